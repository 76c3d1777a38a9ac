"""Peers that tests may kill, stop, or have misbehave.

Run as a process it prints address and key of a region and serves until stdin ends. With "stuck" it sends the
first part of a read and then nothing; else it is an ordinary channel, on the port that is given.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc

from diptych.domain.ports import KvChannel, Region
from diptych.transfer.nixl_library import Transport
from diptych.transfer.open import open_channel
from diptych.v1.kv_pb2 import KvReadPart, KvReadRequest
from diptych.v1.kv_pb2_grpc import KvTransferServicer, add_KvTransferServicer_to_server
from tests.contract.channel_rig import WAIT_S, Memory

NUM_BYTES = 8 << 20
FILL = 0x5C

Reply = Callable[[KvReadRequest, grpc.ServicerContext], Iterator[KvReadPart]]


class Servicer(KvTransferServicer):
    """Generated code on the serving side: shows that what our channel reads is plain protobuf."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def Read(self, request: KvReadRequest, context: grpc.ServicerContext) -> Iterator[KvReadPart]:  # noqa: N802
        return self._reply(request, context)


@contextlib.contextmanager
def peer_that(reply: Reply) -> Iterator[Region]:
    """A server in this process that answers reads by `reply`."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        add_KvTransferServicer_to_server(Servicer(reply), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield Region("grpc", f"127.0.0.1:{port}", b"k" * 16, NUM_BYTES)
        server.stop(None).wait(WAIT_S)


class PeerProcess:
    """A peer in a process of its own."""

    def __init__(self, mode: str, kind: str, num_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, mode, kind, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdout is not None
        address, key = self._process.stdout.readline().split()
        self.region = Region(kind.partition("-")[0], address, bytes.fromhex(key), num_bytes)

    @property
    def port(self) -> int:
        return int(self.region.address.rpartition(":")[2])

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=WAIT_S)


@contextlib.contextmanager
def peer_process(mode: str = "0", kind: str = "grpc", num_bytes: int = NUM_BYTES) -> Iterator[PeerProcess]:
    """Starts a peer, and makes sure that it is gone at the end. "nixl-tcp": NIXL over TCP."""
    peer = PeerProcess(mode, kind, num_bytes)
    try:
        yield peer
    finally:
        peer.kill()


def open_peer(kind: str, port: int) -> KvChannel:
    """A channel of a kind as `peer_process` names it."""
    name, _, transport = kind.partition("-")
    return open_channel(name, "127.0.0.1", port, nixl_transport=cast("Transport", transport or "auto"))


def serve(mode: str, kind: str, num_bytes: int) -> None:
    """The process: until stdin ends."""
    if mode == "stuck":
        stuck = threading.Event()

        def first_part_only(request: KvReadRequest, _: grpc.ServicerContext) -> Iterator[KvReadPart]:
            yield KvReadPart(data=bytes([FILL]) * 1024)
            stuck.wait()

        with peer_that(first_part_only) as region:
            print(region.address, region.key.hex(), flush=True)  # noqa: T201
            sys.stdin.read()
            stuck.set()
        return
    memory = Memory(num_bytes, FILL)
    channel = open_peer(kind, int(mode))
    region = channel.register(memory.span)
    print(region.address, region.key.hex(), flush=True)  # noqa: T201
    sys.stdin.read()
    channel.close()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
