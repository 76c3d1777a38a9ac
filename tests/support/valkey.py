"""Real stores for tests: our embedded Valkey always, Redis 7 in a container where an engine answers.

`store_server` lasts for the whole run; tests share it under shard names of their own (`shard`), which must
be empty when they end. `valkey` is one server for one test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from diptych.store.connect import connect
from diptych.store.embedded import EmbeddedServer

DEADLINE_S = 20.0
"""How long a test waits for what should take milliseconds."""


class StoreServer(Protocol):
    """A store that a test may maltreat."""

    url: str

    def pause(self) -> None:
        """Stops its process, as SIGSTOP does."""

    def resume(self) -> None:
        """Lets it go on."""

    def restart(self) -> None:
        """An empty one at the same address; returns when it answers."""


class EmbeddedStore:
    """The server that ships with us."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self.url = server.url

    def pause(self) -> None:
        assert self._server.pid is not None
        os.kill(self._server.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._server.pid is not None
        os.kill(self._server.pid, signal.SIGCONT)

    def restart(self) -> None:
        self._server.restart()


class ContainerStore:
    """Redis 7 in a container, on a port that stays over restarts."""

    def __init__(self, container: Any, port: int) -> None:
        self._container = container.get_wrapped_container()
        self.url = f"redis://127.0.0.1:{port}/0"

    def pause(self) -> None:
        self._container.pause()

    def resume(self) -> None:
        self._container.unpause()

    def restart(self) -> None:
        self._container.restart(timeout=0)
        wait_for(self._answers)

    def _answers(self) -> bool:
        status, _ = self._container.exec_run(["redis-cli", "ping"])
        return bool(status == 0)


@contextlib.contextmanager
def embedded_store(folder: Path) -> Iterator[StoreServer]:
    with EmbeddedServer(folder) as server:
        yield EmbeddedStore(server)


@contextlib.contextmanager
def redis7_store(_: Path) -> Iterator[StoreServer]:
    """Skips where no container engine answers (a failure under DIPTYCH_REQUIRE=compose)."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    try:
        probe_engine(host)
    except OSError as error:
        pytest.skip(f"no container engine answers at {host}: {error}")
    from testcontainers.core.container import DockerContainer

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # fixed, so that the address stays over restarts
    with DockerContainer("redis:7").with_bind_ports(6379, port) as container:
        store = ContainerStore(container, port)
        wait_for(store._answers)
        yield store


def probe_engine(host: str) -> None:
    """Raises OSError unless something listens there. (The client of docker's own leaks its socket on
    failure.)
    """
    address = urlsplit(host)
    if address.scheme == "unix":
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.path)
    else:
        socket.create_connection((address.hostname or "", address.port or 2375), timeout=5).close()


STORES = {"valkey": embedded_store, "redis7": redis7_store}


@pytest.fixture(scope="session", params=["valkey", pytest.param("redis7", marks=pytest.mark.compose)])
def store_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreServer]:
    with STORES[request.param](tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """An embedded server of the test's own."""
    with EmbeddedServer(tmp_path / "v") as server:
        yield server


@pytest.fixture
async def redis(store_server: StoreServer) -> AsyncIterator[Redis]:
    client = await connect(store_server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def shard(redis: Redis) -> AsyncIterator[str]:
    """A shard's name. The test must leave no key in it."""
    name = f"test-{secrets.token_hex(4)}"
    yield name
    assert await keys_of(redis, name) == []


async def keys_of(redis: Redis, shard: str) -> list[str]:
    """What a shard holds."""
    return sorted([key.decode() async for key in redis.scan_iter(match=f"diptych:{{{shard}}}:*", count=1000)])


async def claim_waits(redis: Redis) -> None:
    """Returns when a claim blocks at the server."""

    async def one_does() -> bool:
        return any(client["cmd"] == "xreadgroup" for client in await redis.client_list())

    await eventually(one_does)


@contextlib.contextmanager
def paused(server: StoreServer) -> Iterator[None]:
    """The server is stopped meanwhile."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


async def eventually(condition: Callable[[], Awaitable[bool]], deadline_s: float = DEADLINE_S) -> None:
    """Returns when the condition holds; TimeoutError when it never does."""
    async with asyncio.timeout(deadline_s):
        while not await condition():
            await asyncio.sleep(0.01)


def wait_for(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """As `eventually`, outside of an event loop."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)
