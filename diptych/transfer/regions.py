"""Memory that peers may read, by unguessable key.

Bytes are only ever touched inside `borrow`, under the lock that `close` takes: once `close` has returned,
nobody reads the memory any more and its owner may free it. A borrow is short (one part of a read, or one
copy in memory).
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.domain.errors import TransferFailed
from diptych.domain.ports import MemorySpan
from diptych.transfer.reads import Devices, is_host

KEY_BYTES = 16


class UnknownRegion(TransferFailed):
    """No region has this key: it is stale (its owner restarted or closed), or made up."""


class OutsideRegion(TransferFailed):
    """The bytes asked for are not all inside the region."""


class Regions:
    """The regions of one channel. Keys are random, so those of an earlier process are unknown here."""

    def __init__(self, devices: Devices = is_host) -> None:
        self._lock = threading.Lock()
        self._devices = devices
        self._spans: dict[bytes, MemorySpan] = {}

    def add(self, memory: MemorySpan) -> bytes:
        """The key of newly readable memory. Raises ValueError unless it has bytes, on a device we take."""
        if not self._devices(memory.device):
            raise ValueError(f"only host memory can be read here, not memory on {memory.device}")
        if memory.num_bytes < 1:
            raise ValueError("a region needs at least one byte")
        key = secrets.token_bytes(KEY_BYTES)
        with self._lock:
            self._spans[key] = memory
        return key

    def check(self, key: bytes, offset: int, num_bytes: int) -> None:
        """Raises UnknownRegion or OutsideRegion where `borrow` would."""
        with self._lock:
            self._find(key, offset, num_bytes)

    def find(self, key: bytes) -> MemorySpan:
        """A whole region, for channels whose readers reach it by themselves. Raises UnknownRegion."""
        with self._lock:
            return self._lookup(key)

    @contextmanager
    def borrow(self, key: bytes, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """View of a part of a region, valid inside the `with`. Raises UnknownRegion, OutsideRegion."""
        with self._lock, self._find(key, offset, num_bytes).view().toreadonly() as view:
            yield view

    def close(self) -> None:
        """Forgets every region, after the borrow under way."""
        with self._lock:
            self._spans.clear()

    def _find(self, key: bytes, offset: int, num_bytes: int) -> MemorySpan:
        found = self._lookup(key)
        if offset < 0 or num_bytes < 1 or num_bytes > found.num_bytes - offset:
            raise OutsideRegion(f"{offset} + {num_bytes} is outside of the region's {found.num_bytes} bytes")
        return found.slice(offset, num_bytes)

    def _lookup(self, key: bytes) -> MemorySpan:
        found = None
        for known, span in self._spans.items():  # all of them, so that time tells nothing about a key
            if hmac.compare_digest(known, key):
                found = span
        if found is None:
            raise UnknownRegion("the region is unknown or stale")
        return found
