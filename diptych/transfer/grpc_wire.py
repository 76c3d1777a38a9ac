"""What the two ends of the gRPC channel must agree upon: sizes, keepalive, the method, and which status
means what.

Keepalive notices a peer that was stopped (its kernel still answers, it does not) within about five seconds.
The server tolerates pings as frequent as the client's, or it would send GOAWAY; idle connections do not
ping.
"""

from __future__ import annotations

import grpc
import grpc.experimental

from diptych.domain.errors import LayoutMismatch, PeerError, PeerLost, TransferFailed
from diptych.v1 import kv_pb2

KIND = "grpc"
SERVICE = kv_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name
READ_METHOD = f"/{SERVICE}/Read"

PART_BYTES = 1 << 20
"""Most bytes of KV in one message. Measured over loopback: an eighth of it is a third slower."""

_PART_MESSAGE_BYTES = PART_BYTES + 64
_REQUEST_MESSAGE_BYTES = 1024

Options = list[tuple[str, int]]

_KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    # How long a ping may stay unanswered. gRPC's default of a minute would outlast the timeout above.
    ("grpc.http2.ping_timeout_ms", 3000),
]

SERVER_OPTIONS: Options = [
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # A second process on the port is an error, not a coin toss.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _REQUEST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _PART_MESSAGE_BYTES),
]

CLIENT_OPTIONS: Options = [
    *_KEEPALIVE,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", _PART_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _REQUEST_MESSAGE_BYTES),
    # Who asked for the read decides whether to ask again.
    ("grpc.enable_retries", 0),
    # Peers are dialled where they are registered, nowhere else.
    ("grpc.enable_http_proxy", 0),
    # Dialling anew really dials: no back-off left by an earlier channel.
    ("grpc.use_local_subchannel_pool", 1),
    # The reading thread waits for its own messages: no second thread, no hand-over between the two.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
]

_LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


def peer_error(address: str, failure: grpc.RpcError) -> PeerError:
    """The domain's error for a read that ended with `failure`; CANCELLED is the peer's doing, not ours."""
    code, details = failure.code(), failure.details()
    message = f"{address}: {details or code.name}"
    if code in _LOST:
        return PeerLost(message)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return LayoutMismatch(message)
    return TransferFailed(message)
