"""The seams between rooms, as Protocols: the runner with its KV pool, and the KV channel.

**Who owns what.** A runner owns its pool's memory; the scheduler owns which block belongs to whom. A channel
owns nothing: it registers memory that others own, lets peers read it, and reads peers' memory into ours. No
Protocol here has a way to write into another process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from diptych.domain.errors import PeerError
from diptych.domain.layout import KvLayout
from diptych.domain.plan import BlockTables, StepOutcome, StepPlan


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """`num_bytes` bytes at `address` on `device` ("cpu", "cuda:0"). `owner` keeps the memory alive."""

    address: int
    num_bytes: int
    device: str = "cpu"
    owner: object = None

    def slice(self, offset: int, num_bytes: int) -> MemorySpan:
        """A part of this span. Raises ValueError when it is not inside."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"{offset} + {num_bytes} is outside of {self.num_bytes} bytes")
        return MemorySpan(self.address + offset, num_bytes, self.device, self.owner)

    def view(self) -> memoryview:
        """The bytes as a writable buffer. Host memory only."""
        if self.device != "cpu":
            raise ValueError(f"memory on {self.device} has no host view")
        return memoryview((ctypes.c_ubyte * self.num_bytes).from_address(self.address)).cast("B")


@dataclass(frozen=True, slots=True)
class Region:
    """How a peer finds memory that was registered with a channel: sent as protobuf, opaque to everyone else.

    `kind` is the channel's name, `address` where its owner listens ("host:port", or an agent's name),
    `key` an unguessable name of the region, fresh in every process start.
    """

    kind: str
    address: str
    key: bytes
    num_bytes: int
    base: int = 0
    """Address of the region's first byte in its owner, for channels that read by address."""
    metadata: bytes = b""
    """What the channel needs to connect, such as an agent's metadata."""


@dataclass(frozen=True, slots=True)
class RemotePiece:
    """Bytes of a peer that may be read."""

    region: Region
    offset: int
    num_bytes: int


class Read(Protocol):
    """One read under way. It ends exactly once; until then the local span belongs to the channel."""

    @property
    def done(self) -> bool:
        """True once no byte of the local span will change any more."""

    @property
    def error(self) -> PeerError | None:
        """After `done`: None when every byte arrived, else why not."""

    def cancel(self) -> None:
        """Asks for an early end. `done` still tells when it has ended."""


class KvChannel(Protocol):
    """Moves opaque bytes from a peer's registered memory into ours."""

    @property
    def kind(self) -> str:
        """ "memory", "grpc" or "nixl"."""

    def register(self, memory: MemorySpan) -> Region:
        """Lets peers read `memory` until `close`. `memory` must stay alive until then."""

    def prepare(self, memory: MemorySpan) -> None:
        """Tells that reads will land in parts of `memory`, so that it is made ready once and not each time.
        Changes nothing else. `memory` must stay alive until `close`."""

    def read(
        self, remote: RemotePiece, local: MemorySpan, deadline_s: float, on_done: Callable[[], None]
    ) -> Read:
        """Starts to read `remote` into `local` (same length) and returns at once.

        Ends with PeerLost or TransferFailed within `deadline_s` seconds.
        `on_done` is called once, from any thread, after `done` turned true; it must not block.
        Raises ValueError when the lengths differ.
        """

    def close(self) -> None:
        """Ends all reads, refuses new ones, and forgets all regions. Idempotent."""


class Runner(Protocol):
    """A model with its paged KV pool. Synchronous; used by one thread."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Most positions of one sequence, prompt and output together."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks in the pool of each layer group."""

    def run(self, plan: StepPlan, stop: Callable[[], bool] | None = None) -> StepOutcome:
        """Runs one step. `stop` is polled between layers; once true, the outcome is `aborted`."""

    def pack(self, tables: BlockTables, start: int, num_tokens: int, out: MemorySpan) -> bytes:
        """Writes positions `start` to `start + num_tokens` in the canonical wire layout to `out`, which has
        exactly `layout.chunk_bytes(num_tokens)` bytes. Returns the 16-byte digest of what was written."""

    def digest(self, data: MemorySpan) -> bytes:
        """16-byte digest (XXH3-128, big-endian) of `data`."""

    def unpack(self, data: MemorySpan, tables: BlockTables, start: int, num_tokens: int) -> None:
        """The inverse of `pack`, into blocks that may be laid out otherwise."""
