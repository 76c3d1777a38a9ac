"""The KV channel over gRPC: works everywhere, carries TLS.

    read() ─▶ Peer (one a peer: queue, threads, connection) ─ Read(key, offset, length) ─▶ RegionServer ─▶
    Regions
                      ◀──────────────── parts of at most 1 MiB, in order ────────────────

Both ends live in the engine process, beside the model: threads wait without the GIL, and each byte is copied
once on either side under it. `close` first forgets the regions, so that their memory may be freed, then ends
the served and the own reads, then the threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from diptych.domain.errors import TransferFailed
from diptych.domain.ports import MemorySpan, Region, RemotePiece
from diptych.transfer.address import bracketed, check_dialable
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.grpc_peer import Peer
from diptych.transfer.grpc_server import RegionServer
from diptych.transfer.grpc_wire import KIND
from diptych.transfer.reads import PendingRead, Reads
from diptych.transfer.regions import Regions

IDLE_PEER_S = 300.0
"""A peer that nothing was read from for so long is hung up on when another one is dialled."""


class GrpcChannel:
    """A `KvChannel` that serves and reads over gRPC."""

    def __init__(
        self,
        host: str,
        port: int,
        advertise_host: str | None = None,
        tls: ChannelTls | None = None,
    ) -> None:
        """Listens at once. `advertise_host` is what peers dial, where that is not `host`.

        Raises InvalidField when the address can't be listened on or dialled.
        """
        check_dialable(host, advertise_host)
        self._tls = tls
        self._regions = Regions()
        self._reads = Reads(KIND)
        self._server = RegionServer(self._regions, bracketed(host), port, tls)
        self._address = f"{bracketed(advertise_host or host)}:{self._server.port}"
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._retired: list[Peer] = []

    @property
    def kind(self) -> str:
        return KIND

    @property
    def address(self) -> str:
        """Where peers reach this channel, "host:port"."""
        return self._address

    def register(self, memory: MemorySpan) -> Region:
        """Lets whoever learns the region's key read `memory` until `close`. Host memory only (ValueError)."""
        self._reads.check_open()
        return Region(KIND, self._address, self._regions.add(memory), memory.num_bytes)

    def prepare(self, memory: MemorySpan) -> None:
        """Nothing has to be ready."""

    def read(
        self, remote: RemotePiece, local: MemorySpan, deadline_s: float, on_done: Callable[[], None]
    ) -> PendingRead:
        """Starts a read; raises as `Reads.open`."""
        address = remote.region.address
        with self._lock:
            read = self._reads.open(remote, local, deadline_s, on_done)
            peer = self._peers.get(address)
            if peer is None or not peer.submit(read):
                self._dial(address).submit(read)
        return read

    def close(self) -> None:
        """Ends all reads, refuses new ones, and forgets all regions. Idempotent; leaves no thread."""
        self._regions.close()
        with self._lock:
            self._reads.stop()
            peers = [*self._peers.values(), *self._retired]
        self._server.close()
        for peer in peers:
            peer.retire(TransferFailed("the grpc channel was closed"))
            peer.join()
        self._reads.close()

    def _dial(self, address: str) -> Peer:
        """A new peer at `address`; hangs up on those that are not needed any more. Under the lock."""
        now = time.monotonic()
        for other in list(self._peers.values()):
            if other.retired or other.idle_s(now) > IDLE_PEER_S:
                self._retired.append(self._peers.pop(other.address))
        for other in self._retired:
            other.retire(TransferFailed("the peer was replaced"))
        self._retired = [other for other in self._retired if not other.gone]
        self._peers[address] = peer = Peer(address, self._tls)
        return peer
