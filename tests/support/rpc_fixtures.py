"""Fixtures for tests on real sockets: servers and diallers that are gone when the test ends."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from diptych.rpc.dial import Dialer
from diptych.rpc.server import Registration, RpcServer, serve

Serve = Callable[..., Awaitable[RpcServer]]

DEADLINE_S = 10.0
"""How long a test waits for what should take milliseconds."""


@pytest.fixture
async def serving() -> AsyncIterator[Serve]:
    """`await serving(registration, address=…, tls=…)`: a started server on a free port of loopback."""
    async with AsyncExitStack() as stack:

        async def start(*registrations: Registration, address: str = "127.0.0.1:0", **rest: Any) -> RpcServer:
            server = await serve(registrations, address=address, **rest)
            stack.push_async_callback(server.drain, 0)
            return server

        yield start


@pytest.fixture
async def dialer() -> AsyncIterator[Dialer]:
    async with Dialer() as dialer:
        yield dialer
