"""The KV channel within one process: a fabric connects its channels, a read is one copy.

For tests, and for prefill and decode in one process. It keeps every promise of the Protocol that a network
makes hard: reads end on another thread than the caller's, regions die with their channel, and a closed peer
is a lost peer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from diptych.domain.errors import InvalidField, PeerError, PeerLost
from diptych.domain.ports import KvChannel, MemorySpan, Region, RemotePiece
from diptych.transfer.faults import Faults, FaultyChannel
from diptych.transfer.reads import PendingRead, Reads
from diptych.transfer.regions import Regions

KIND = "memory"


class MemoryFabric:
    """Connects the channels that are opened on it. Two fabrics know nothing of each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_opened = 0
        self._regions: dict[str, Regions] = {}

    def open(self, host: str = "memory", port: int = 0, faults: Faults | None = None) -> KvChannel:
        """A new channel, whose reads fail as `faults` say. Port 0: a free one. InvalidField: it is taken."""
        with self._lock:
            self._num_opened += 1
            address = f"{host}:{port or self._num_opened}"
            if address in self._regions:
                raise InvalidField("kv port", f"{address} is taken")
            self._regions[address] = regions = Regions()
        channel = MemoryChannel(self, address, regions)
        return channel if faults is None else FaultyChannel(channel, faults)

    def find(self, address: str) -> Regions:
        """The regions of the channel at `address`. Raises PeerLost when none is open there."""
        with self._lock:
            regions = self._regions.get(address)
        if regions is None:
            raise PeerLost(f"no memory channel is open at {address}")
        return regions

    def leave(self, address: str) -> None:
        """Called by a channel that closes."""
        with self._lock:
            self._regions.pop(address, None)


class MemoryChannel:
    """A `KvChannel` to the others of one fabric. Copies on its alarm's thread, one read at a time."""

    def __init__(self, fabric: MemoryFabric, address: str, regions: Regions) -> None:
        self._fabric = fabric
        self._address = address
        self._regions = regions
        self._reads = Reads(KIND)

    @property
    def kind(self) -> str:
        return KIND

    def register(self, memory: MemorySpan) -> Region:
        """Lets the fabric's other channels read `memory` until `close`."""
        self._reads.check_open()
        return Region(KIND, self._address, self._regions.add(memory), memory.num_bytes)

    def prepare(self, memory: MemorySpan) -> None:
        """Nothing has to be ready."""

    def read(
        self, remote: RemotePiece, local: MemorySpan, deadline_s: float, on_done: Callable[[], None]
    ) -> PendingRead:
        """Starts a read; raises as `Reads.open`."""
        read = self._reads.open(remote, local, deadline_s, on_done)
        self._reads.alarm.soon(lambda: self._copy(read))
        return read

    def close(self) -> None:
        """Ends all reads, refuses new ones, and forgets all regions."""
        self._fabric.leave(self._address)
        self._regions.close()
        self._reads.stop()
        self._reads.close()

    def _copy(self, read: PendingRead) -> None:
        if not read.begin():
            return
        error: PeerError | None = None
        try:
            region = read.remote.region
            with self._fabric.find(region.address).borrow(
                region.key, read.remote.offset, read.remote.num_bytes
            ) as view:
                read.local.view()[:] = view
        except PeerError as failure:
            error = failure
        read.finish(error)
