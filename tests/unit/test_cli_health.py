"""The probe that container engines run."""

from __future__ import annotations

import asyncio
import socket

import pytest

from diptych.cli import health
from diptych.rpc.server import serve


async def probe(address: str) -> int:
    return await asyncio.to_thread(health.main, [address])


async def test_it_tells_ready_from_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    server = await serve([], address="127.0.0.1:0", serving=False)
    try:
        assert await probe(server.address) == 1
        await server.set_serving(True)
        assert await probe(server.address) == 0
    finally:
        await server.drain(0)
    assert capsys.readouterr().out.split() == ["NOT_SERVING", "SERVING"]


async def test_nobody_there_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert await probe(f"127.0.0.1:{port}") == 1
    assert "no answer" in capsys.readouterr().out


def test_an_address_is_needed() -> None:
    assert health.main([]) == 2
