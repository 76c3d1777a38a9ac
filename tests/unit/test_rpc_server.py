"""A server's life on real sockets: starting, answering, failing, draining."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diptych.domain.errors import Draining, Internal, InvalidField, PeerLost, Stale, TooLarge
from diptych.rpc.dial import Dialer
from diptych.rpc.options import MAX_MESSAGE_BYTES
from diptych.rpc.server import RpcServer, serve
from diptych.rpc.status import domain_errors
from tests.support.echo_service import SERVICE, EchoStub, echo, echo_service
from tests.support.rpc_fixtures import DEADLINE_S, Serve

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Gate:
    """A stream that sends one item, tells that it did, and waits to be let go."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.ended_with: list[type[BaseException] | None] = []

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            self.entered.set()
            await self.release.wait()
            yield b"last"
        except BaseException as error:
            self.ended_with.append(type(error))
            raise
        self.ended_with.append(None)


async def health_of(dialer: Dialer, server: RpcServer, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(dialer.channel(server.address))
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_health_and_reflection_answer(serving: Serve, dialer: Dialer) -> None:
    server = await serving(echo_service(unary=echo))
    assert server.bound_port > 0
    assert await health_of(dialer, server) == SERVING
    assert await health_of(dialer, server, SERVICE) == SERVING

    stub = reflection_pb2_grpc.ServerReflectionStub(dialer.channel(server.address))
    (answer,) = [a async for a in stub.ServerReflectionInfo(iter([_list_services()]))]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def _list_services() -> reflection_pb2.ServerReflectionRequest:
    return reflection_pb2.ServerReflectionRequest(list_services="")


async def test_a_server_that_is_not_ready_says_so_and_answers(serving: Serve, dialer: Dialer) -> None:
    server = await serving(echo_service(unary=echo), serving=False)
    assert await health_of(dialer, server, SERVICE) == NOT_SERVING
    assert await EchoStub(dialer.channel(server.address)).unary(b"x") == b"x"
    await server.set_serving(True)
    assert await health_of(dialer, server, SERVICE) == SERVING


async def test_all_four_kinds_carry_results_and_errors(serving: Serve, dialer: Dialer) -> None:
    async def unary(request: bytes, context: Any) -> bytes:
        if not request:
            raise Stale("unary")
        return request

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for letter in request:
            yield bytes([letter])
        if request == b"ab":
            raise Stale("stream")

    async def collect(requests: Any, context: Any) -> bytes:
        whole = b"".join([request async for request in requests])
        if whole == b"ab":
            raise Stale("collect")
        return whole

    async def both(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            if request == b"!":
                raise Stale("both")
            yield request

    server = await serving(echo_service(unary=unary, stream=stream, collect=collect, both=both))
    stub = EchoStub(dialer.channel(server.address))

    assert await stub.unary(b"x") == b"x"
    assert [item async for item in stub.stream(b"xyz")] == [b"x", b"y", b"z"]
    assert await stub.collect(iter([b"x", b"y"])) == b"xy"
    assert [item async for item in stub.both(iter([b"x", b"y"]))] == [b"x", b"y"]
    with pytest.raises(Stale, match="unary"), domain_errors():
        await stub.unary(b"")
    with pytest.raises(Stale, match="stream"), domain_errors():
        [item async for item in stub.stream(b"ab")]
    with pytest.raises(Stale, match="collect"), domain_errors():
        await stub.collect(iter([b"a", b"b"]))
    with pytest.raises(Stale, match="both"), domain_errors():
        [item async for item in stub.both(iter([b"a", b"!"]))]
    await until(lambda: server.num_running == 0)


async def test_a_bug_is_logged_here_and_told_plainly_there(
    serving: Serve, dialer: Dialer, caplog: pytest.LogCaptureFixture
) -> None:
    async def unary(request: bytes, context: Any) -> bytes:
        raise KeyError("a secret of the inside")

    server = await serving(echo_service(unary=unary))
    with caplog.at_level(logging.ERROR), pytest.raises(Internal) as caught, domain_errors():
        await EchoStub(dialer.channel(server.address)).unary(b"")

    assert "secret" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert f"/{SERVICE}/Unary" in str(caught.value)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


async def test_a_peers_failure_goes_on_to_the_caller(serving: Serve, dialer: Dialer) -> None:
    async def behind(request: bytes, context: Any) -> bytes:
        raise InvalidField("token_ids", "49152 is past the vocabulary")

    back = await serving(echo_service(unary=behind))

    async def before(request: bytes, context: Any) -> bytes:
        return await EchoStub(dialer.channel(back.address)).unary(request)

    front = await serving(echo_service(unary=before))
    with pytest.raises(InvalidField, match="token_ids: 49152"), domain_errors():
        await EchoStub(dialer.channel(front.address)).unary(b"")


async def test_a_handler_may_write_to_the_context_itself(serving: Serve, dialer: Dialer) -> None:
    async def writes(request: bytes, context: Any) -> None:
        await context.write(request)
        raise Stale("after one")

    server = await serving(echo_service(stream=writes))  # type: ignore[arg-type]
    call = EchoStub(dialer.channel(server.address)).stream(b"x")
    assert await call.read() == b"x"
    with pytest.raises(Stale), domain_errors():
        await call.read()


@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_messages_are_bounded(serving: Serve, dialer: Dialer, over: int) -> None:
    server = await serving(echo_service(unary=echo))
    message = bytes(MAX_MESSAGE_BYTES + over)
    stub = EchoStub(dialer.channel(server.address))
    if over > 0:
        with pytest.raises(TooLarge, match="RESOURCE_EXHAUSTED"), domain_errors():
            await stub.unary(message)
    else:
        assert await stub.unary(message) == message


async def test_the_server_bounds_messages_of_a_careless_client(serving: Serve) -> None:
    server = await serving(echo_service(unary=echo))
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await EchoStub(channel).unary(bytes(MAX_MESSAGE_BYTES + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await EchoStub(channel).unary(b"still here") == b"still here"


async def test_drain_waits_for_a_stream_and_refuses_new_calls(serving: Serve, dialer: Dialer) -> None:
    gate = Gate()
    server = await serving(echo_service(unary=echo, stream=gate.stream))
    stub = EchoStub(dialer.channel(server.address))
    call = stub.stream(b"")
    assert await call.read() == b"first"
    await gate.entered.wait()

    drain = asyncio.create_task(server.drain(DEADLINE_S))
    while await health_of(dialer, server) != NOT_SERVING:
        pass
    with pytest.raises(Draining), domain_errors():
        await stub.unary(b"too late")
    assert not drain.done()

    gate.release.set()
    assert await call.read() == b"last"
    assert await call.read() is grpc.aio.EOF
    assert await drain is True
    assert gate.ended_with == [None]


async def test_drain_is_bounded(serving: Serve, dialer: Dialer) -> None:
    gate = Gate()
    server = await serving(echo_service(stream=gate.stream))
    call = EchoStub(dialer.channel(server.address)).stream(b"")
    assert await call.read() == b"first"
    await gate.entered.wait()

    assert await server.drain(0.01) is False

    assert server.num_running == 0
    assert gate.ended_with == [asyncio.CancelledError]
    with pytest.raises(PeerLost), domain_errors():
        await call.read()
    assert await server.drain(0) is True


async def test_a_health_watch_hears_of_the_drain_and_does_not_hold_it_up(
    serving: Serve, dialer: Dialer
) -> None:
    server = await serving(echo_service(unary=echo))
    watch = health_pb2_grpc.HealthStub(dialer.channel(server.address)).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    drain = asyncio.create_task(server.drain(DEADLINE_S * 10))
    assert (await watch.read()).status == NOT_SERVING
    async with asyncio.timeout(DEADLINE_S):
        assert await drain is True


async def test_cancelling_reaches_the_handler(serving: Serve, dialer: Dialer) -> None:
    gate = Gate()
    server = await serving(echo_service(stream=gate.stream))
    call = EchoStub(dialer.channel(server.address)).stream(b"")
    assert await call.read() == b"first"
    await gate.entered.wait()
    call.cancel()
    await until(lambda: gate.ended_with)
    assert gate.ended_with == [asyncio.CancelledError]
    await until(lambda: server.num_running == 0)


async def test_a_deadline_reaches_the_handler(serving: Serve, dialer: Dialer) -> None:
    gate = Gate()
    server = await serving(echo_service(stream=gate.stream))
    call = EchoStub(dialer.channel(server.address)).stream(b"", timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        [item async for item in call]
    await until(lambda: server.num_running == 0)
    assert set(gate.ended_with) <= {asyncio.CancelledError}


async def test_200_cancelled_streams_leave_nothing(serving: Serve, dialer: Dialer) -> None:
    closed = 0

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal closed
        try:
            while True:
                yield bytes(1000)
        finally:
            closed += 1

    server = await serving(echo_service(unary=echo, stream=endless))
    stub = EchoStub(dialer.channel(server.address))
    await stub.unary(b"connected")
    before = asyncio.all_tasks()
    for _ in range(10):
        calls = [stub.stream(b"") for _ in range(20)]
        await asyncio.gather(*(call.read() for call in calls))
        for call in calls:
            call.cancel()
    del calls, call
    await until(lambda: server.num_running == 0 and closed == 200)
    await until(lambda: not asyncio.all_tasks() - before)


async def test_a_port_has_one_owner(serving: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    first = await serving(echo_service(unary=echo))
    with pytest.raises(
        InvalidField, match=f"^listen: cannot listen on {first.address}: Address already in use"
    ):
        await serve([echo_service(unary=echo)], address=first.address)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:port", "not host:port"),
        ("127.0.0.1:70000", "not host:port"),
        ("127.0.0.1", "not host:port"),
        ("", "not host:port"),
        ("192.0.2.1:0", "Cannot assign requested address"),
    ],
)
async def test_an_address_that_cannot_be_had_is_named(address: str, why: str) -> None:
    with pytest.raises(InvalidField, match=f"^listen: cannot listen on {address}: {why}"):
        await serve([], address=address)
