"""One region of a peer, as the reading side knows it, and the way there.

    asked ── described ──▶ meeting ── a first small read ended ──▶ ready
      │ refused, unreachable      │ failed                            │ a read failed with the connection
      ▼                           ▼                                   ▼
    gone: what waits ends with the reason; the next read asks anew

The first read goes to a scratch area of ours, because it is where connections hang: while a peer that was
stopped does not finish its half, nothing of a caller's is promised to UCX, and callers' reads can still be
ended at once. What the owner's process is (its agent's name) is new with each of its starts, so a peer that
was restarted at the same address is asked, connected and checked anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import grpc

from diptych.domain.errors import PeerError, TransferFailed
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.ports import Region
from diptych.transfer.grpc_wire import CLIENT_OPTIONS, peer_error
from diptych.transfer.nixl_library import Transport
from diptych.transfer.nixl_place import why_not_one_sided
from diptych.transfer.nixl_server import DESCRIBE_METHOD
from diptych.transfer.reads import PendingRead
from diptych.v1.kv_pb2 import KvDescribeRequest, KvDescription

DESCRIBE_TIMEOUT_S = 10.0
HELLO_BYTES = 64

SourceKey = tuple[str, bytes]
"""Address and key of a region."""


class Stage(Enum):
    """How far we have come with a region."""

    ASKED = auto()
    MEETING = auto()
    READY = auto()


@dataclass(slots=True)
class Source:
    """Belongs to the reader's thread."""

    region: Region
    used_at: float
    stage: Stage = Stage.ASKED
    description: KvDescription = field(default_factory=KvDescription)
    waiting: deque[PendingRead] = field(default_factory=deque)

    @property
    def key(self) -> SourceKey:
        return self.region.address, self.region.key

    @property
    def agent(self) -> str:
        """Of its owner; empty until that was told."""
        return self.description.agent

    def address_of(self, read: PendingRead) -> int:
        """Where the bytes of a read begin. Raises TransferFailed unless they are all inside the region."""
        offset, num_bytes = read.remote.offset, read.remote.num_bytes
        if num_bytes > self.description.num_bytes - offset:
            raise TransferFailed(
                f"{offset} + {num_bytes} is outside of the region's {self.description.num_bytes} bytes"
            )
        return self.description.base + offset

    def end(self, reason: PeerError) -> None:
        """Nothing comes of it: ends what waits."""
        while self.waiting:
            self.waiting.popleft().stop(reason)


def check_one_sided(description: KvDescription, transport: Transport, rdma: bool) -> None:
    """Raises TransferFailed when reading would need the owner's help and nobody asked for that."""
    if transport == "tcp":
        return
    problem = why_not_one_sided(description.place, description.pid, rdma and description.rdma)
    if problem:
        raise TransferFailed(f"nixl can't read from here by itself: {problem}")


def ask(region: Region, told: Callable[[KvDescription | PeerError], None]) -> None:
    """Has a region described by its owner. `told` is called once, from any thread."""
    channel = grpc.insecure_channel(region.address, CLIENT_OPTIONS)
    call = channel.unary_unary(
        DESCRIBE_METHOD,
        request_serializer=KvDescribeRequest.SerializeToString,
        response_deserializer=KvDescription.FromString,
    ).future(KvDescribeRequest(wire_version=WIRE_VERSION, region_key=region.key), timeout=DESCRIBE_TIMEOUT_S)

    def ended(call: grpc.Future[KvDescription]) -> None:
        try:
            told(call.result())
        except grpc.RpcError as failure:
            told(peer_error(region.address, failure))
        finally:
            channel.close()

    call.add_done_callback(ended)
