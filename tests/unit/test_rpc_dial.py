"""Channels: one a peer, back again when the peer is, never chased away for pinging."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from diptych.domain.errors import PeerLost
from diptych.rpc import options
from diptych.rpc.dial import Dialer
from diptych.rpc.server import serve
from diptych.rpc.status import domain_errors
from tests.support.echo_service import EchoStub, echo, echo_service
from tests.support.rpc_fixtures import DEADLINE_S, Serve


async def test_one_channel_a_peer(serving: Serve, dialer: Dialer) -> None:
    first, second = await serving(echo_service(unary=echo)), await serving(echo_service(unary=echo))

    assert dialer.channel(first.address) is dialer.channel(first.address)
    assert dialer.channel(first.address) is not dialer.channel(second.address)


async def test_forget_leaves_no_channel(serving: Serve, dialer: Dialer) -> None:
    server = await serving(echo_service(unary=echo))
    channel = dialer.channel(server.address)
    assert await EchoStub(channel).unary(b"hello") == b"hello"

    await dialer.forget(server.address)
    await dialer.forget("127.0.0.1:1")

    with pytest.raises(grpc.aio.UsageError, match="closed"):
        await EchoStub(channel).unary(b"hello")
    assert dialer.channel(server.address) is not channel
    assert await EchoStub(dialer.channel(server.address)).unary(b"again") == b"again"


async def test_a_peer_that_is_away_is_lost_and_found_again(dialer: Dialer) -> None:
    server = await serve([echo_service(unary=echo)], address="127.0.0.1:0")
    stub = EchoStub(dialer.channel(server.address))
    assert await stub.unary(b"1") == b"1"
    await server.drain(0)

    with pytest.raises(PeerLost), domain_errors():
        await stub.unary(b"2")

    again = await serve([echo_service(unary=echo)], address=server.address)
    try:
        assert await stub.unary(b"3", wait_for_ready=True, timeout=DEADLINE_S) == b"3"
    finally:
        await again.drain(0)


async def test_our_servers_bear_our_pings_and_others_would_not(
    serving: Serve, dialer: Dialer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every interval scaled down, a long silence costs a stock server's stream and leaves ours alone."""
    monkeypatch.setattr(options, "KEEPALIVE_S", 0.02)
    speak = asyncio.Event()

    async def silent(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await speak.wait()
        yield b"last"

    ours = await serving(echo_service(stream=silent))
    stock = grpc.aio.server()
    echo_service(stream=silent)(stock)
    stock_port = stock.add_insecure_port("127.0.0.1:0")
    await stock.start()
    async with Dialer() as impatient:
        call = EchoStub(impatient.channel(ours.address)).stream(b"")
        control = EchoStub(impatient.channel(f"127.0.0.1:{stock_port}")).stream(b"")
        assert [await call.read(), await control.read()] == [b"first", b"first"]

        with pytest.raises(grpc.aio.AioRpcError, match="too_many_pings|Too many pings"):
            await asyncio.wait_for(control.read(), DEADLINE_S)

        speak.set()
        assert await call.read() == b"last"
    await stock.stop(None)
