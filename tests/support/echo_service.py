"""A servicer of bytes for tests of the rpc room: no protos, each method as the test gives it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from diptych.rpc.server import Registration

SERVICE = "diptych.test.Echo"

Answer = Callable[[Any, Any], Awaitable[bytes]]
Stream = Callable[[Any, Any], AsyncIterator[bytes]]


def echo_service(
    *,
    unary: Answer | None = None,
    stream: Stream | None = None,
    collect: Answer | None = None,
    both: Stream | None = None,
) -> Registration:
    """Registers the methods that are given, as `Unary`, `Stream`, `Collect` and `Both`."""
    handlers = {}
    if unary:
        handlers["Unary"] = grpc.unary_unary_rpc_method_handler(unary)
    if stream:
        handlers["Stream"] = grpc.unary_stream_rpc_method_handler(stream)
    if collect:
        handlers["Collect"] = grpc.stream_unary_rpc_method_handler(collect)
    if both:
        handlers["Both"] = grpc.stream_stream_rpc_method_handler(both)

    def register(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    return register


class EchoStub:
    """The client's side of it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.unary = channel.unary_unary(f"/{SERVICE}/Unary")
        self.stream = channel.unary_stream(f"/{SERVICE}/Stream")
        self.collect = channel.stream_unary(f"/{SERVICE}/Collect")
        self.both = channel.stream_stream(f"/{SERVICE}/Both")


async def echo(request: bytes, context: Any) -> bytes:
    """A unary method that answers with what it was asked."""
    return request
