"""What the channel tests share: implementations behind one rig, guarded memory, waiting without sleep."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import numpy as np
import trustme

from diptych.domain.ports import KvChannel, MemorySpan, Read, Region, RemotePiece
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.faults import EACH, Faults, FaultyChannel
from diptych.transfer.grpc import GrpcChannel
from diptych.transfer.memory import MemoryFabric
from diptych.transfer.nixl import NixlChannel
from diptych.transfer.nixl_library import Transport
from diptych.transfer.several import ChannelSet

WAIT_S = 30.0
"""Generous: a test that needs so long has failed."""

GUARD_BYTES = 64
GUARD = 0xA5


class Memory:
    """`num_bytes` of host memory between two guards."""

    def __init__(self, num_bytes: int, fill: int = 0) -> None:
        self._all = np.full(num_bytes + 2 * GUARD_BYTES, GUARD, dtype=np.uint8)
        self.data = self._all[GUARD_BYTES:-GUARD_BYTES]
        self.data[:] = fill
        self.span = MemorySpan(self.data.ctypes.data, num_bytes, owner=self._all)

    @classmethod
    def random(cls, num_bytes: int, seed: int = 0) -> "Memory":
        memory = cls(num_bytes)
        memory.data[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
        return memory

    def guards_hold(self) -> bool:
        return bool((self._all[:GUARD_BYTES] == GUARD).all() and (self._all[-GUARD_BYTES:] == GUARD).all())


class Started:
    """A read under way, and how often and where its `on_done` ran."""

    def __init__(
        self,
        channel: KvChannel | ChannelSet,
        remote: RemotePiece,
        local: MemorySpan,
        deadline_s: float = WAIT_S,
    ) -> None:
        self.calls: list[tuple[threading.Thread, bool]] = []
        self._called = threading.Event()
        self._assigned = threading.Event()
        self.read: Read = channel.read(remote, local, deadline_s, self._on_done)
        self._assigned.set()

    def _on_done(self) -> None:
        self._assigned.wait(WAIT_S)
        self.calls.append((threading.current_thread(), self.read.done))
        self._called.set()

    def end(self) -> Exception | None:
        """Waits for the end; the read's error."""
        assert self._called.wait(WAIT_S), "the read did not end"
        assert self.read.done
        assert [done for _, done in self.calls] == [True], "on_done runs once, after done"
        return self.read.error


class Rig:
    """Opens channels of one implementation and makes their reads hang on demand."""

    def __init__(self, kind: str, wrapped: bool) -> None:
        self.kind = kind
        self.faults = Faults()
        if wrapped:
            self.faults.delay(EACH, 0.0)  # every read takes the way around
        self._opened: list[KvChannel] = []
        self._close = contextlib.ExitStack()

    def new(self, port: int) -> KvChannel:
        raise NotImplementedError

    def stall(self, region: Region) -> Region:
        """A region from which reads start and never arrive."""
        raise NotImplementedError

    def open(self, port: int = 0) -> KvChannel:
        channel = self.new(port)
        self._opened.append(channel)
        return channel

    def close(self) -> None:
        for channel in self._opened:
            channel.close()
        self._close.close()


class MemoryRig(Rig):
    def __init__(self, wrapped: bool = False) -> None:
        super().__init__("memory", wrapped)
        self._fabric = MemoryFabric()

    def new(self, port: int) -> KvChannel:
        return self._fabric.open("memory", port, self.faults)

    def stall(self, region: Region) -> Region:
        self.faults.hold(EACH)
        return region


class GrpcRig(Rig):
    def __init__(self, wrapped: bool = False, tls: ChannelTls | None = None) -> None:
        super().__init__("grpc", wrapped)
        self._tls = tls

    def new(self, port: int) -> KvChannel:
        return FaultyChannel(GrpcChannel("127.0.0.1", port, tls=self._tls), self.faults)

    def stall(self, region: Region) -> Region:
        return replace(region, address=self._close.enter_context(black_hole()))


class NixlRig(Rig):
    def __init__(self, wrapped: bool = False, transport: Transport = "auto") -> None:
        super().__init__("nixl", wrapped)
        self._transport = transport

    def new(self, port: int) -> KvChannel:
        channel = NixlChannel("127.0.0.1", port, transport=self._transport)
        return FaultyChannel(channel, self.faults)

    def stall(self, region: Region) -> Region:
        return replace(region, address=self._close.enter_context(black_hole()))


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address whose kernel accepts connections that nobody serves."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def make_tls(ca: trustme.CA | None = None) -> ChannelTls:
    """Mutual TLS within one authority."""
    ca = ca or trustme.CA()
    pair = ca.issue_cert("127.0.0.1")
    chain, key, root = pair.cert_chain_pems[0].bytes(), pair.private_key_pem.bytes(), ca.cert_pem.bytes()
    return ChannelTls(
        grpc.ssl_server_credentials([(key, chain)], root_certificates=root, require_client_auth=True),
        grpc.ssl_channel_credentials(root, key, chain),
    )


RIGS: dict[str, Callable[[], Rig]] = {
    "memory": MemoryRig,
    "memory-wrapped": lambda: MemoryRig(wrapped=True),
    "grpc": GrpcRig,
    "grpc-wrapped": lambda: GrpcRig(wrapped=True),
    "grpc-tls": lambda: GrpcRig(tls=make_tls()),
    "nixl": NixlRig,
    "nixl-wrapped": lambda: NixlRig(wrapped=True),
    "nixl-tcp": lambda: NixlRig(transport="tcp"),
}


def piece(region: Region, offset: int = 0, num_bytes: int | None = None) -> RemotePiece:
    """A part of a region; by default all from `offset` on."""
    return RemotePiece(region, offset, region.num_bytes - offset if num_bytes is None else num_bytes)


def kv_threads() -> list[str]:
    """Names of the live threads that channels own."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition that another thread or process brings about."""
    end, tick = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S} s"
        tick.wait(0.01)
