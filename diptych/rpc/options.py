"""The channel options of both sides, in one place, because they have to agree.

A client that pings more often than its server allows is sent GOAWAY (`too_many_pings`) and loses every stream
of that connection. So the server's tolerance is derived from the client's interval here, and nowhere else
set.
"""

from typing import Final

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Largest message either side sends or takes. None grows with a prompt: long prompts travel in pieces."""

KEEPALIVE_S: Final = 20.0
"""How long a connection is silent before either side pings: a peer whose machine is gone is noticed within
this plus `KEEPALIVE_ANSWER_S`. A peer that stopped but whose machine lives is the business of heartbeats."""

KEEPALIVE_ANSWER_S: Final = 10.0
"""How long a ping may stay unanswered before the connection is given up."""

RECONNECT_MIN_S: Final = 0.1
RECONNECT_MAX_S: Final = 2.0
"""Back-off between attempts to reach a peer that is away: a restarted worker is found again within this."""

Options = list[tuple[str, str | int]]


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _sizes() -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]


def dialling_options() -> Options:
    """Options of the side that opens the connection."""
    return [
        *_sizes(),
        ("grpc.keepalive_time_ms", _milliseconds(KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _milliseconds(KEEPALIVE_ANSWER_S)),
        # Since 1.81 a ping's own timeout, a minute by default, outlasts the keepalive's.
        ("grpc.http2.ping_timeout_ms", _milliseconds(KEEPALIVE_ANSWER_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _milliseconds(RECONNECT_MIN_S)),
        ("grpc.min_reconnect_backoff_ms", _milliseconds(RECONNECT_MAX_S)),
        ("grpc.max_reconnect_backoff_ms", _milliseconds(RECONNECT_MAX_S)),
        # Peers are named by address in the registry; a proxy meant for the outside must not sit between them.
        ("grpc.enable_http_proxy", 0),
    ]


def serving_options() -> Options:
    """Options of the side that listens."""
    return [
        *_sizes(),
        # Half the clients' interval, so that no jitter between the two machines costs a connection.
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(KEEPALIVE_S / 2)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_time_ms", _milliseconds(KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _milliseconds(KEEPALIVE_ANSWER_S)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(KEEPALIVE_ANSWER_S)),
        # Two processes must not share a port by accident: the kernel would deal them the calls in turn.
        ("grpc.so_reuseport", 0),
    ]
