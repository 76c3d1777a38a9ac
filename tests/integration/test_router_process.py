"""The router as a process, with a real store and decode workers that are stopped, killed and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme
from redis.asyncio import Redis

from diptych.client.aio import AsyncClient
from diptych.client.values import Piece
from diptych.domain.errors import Draining, PeerLost
from diptych.domain.records import Role
from diptych.rpc.tls import TlsSettings
from diptych.store.connect import connect
from diptych.store.embedded import EmbeddedServer
from diptych.store.registry import Registry
from tests.support.fake_decode import FakeDecode, expected_output
from tests.support.router_process import (
    WAIT_S,
    Process,
    decode_process,
    refused,
    router_flags,
    router_process,
)
from tests.support.router_rig import tokens_of
from tests.support.valkey import eventually, keys_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SHARD = "test"
PROMPT = "tell me a long story"


class System:
    """A store, a router and decode workers."""

    def __init__(self, server: EmbeddedServer, stack: ExitStack) -> None:
        self.server = server
        self.stack = stack
        self.router = stack.enter_context(router_process(server.url, SHARD))

    def decode(self, name: str) -> Process:
        return self.stack.enter_context(decode_process(self.server.url, SHARD, name))


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with ExitStack() as stack:
        yield System(stack.enter_context(EmbeddedServer(tmp_path / "v")), stack)


@pytest.fixture
async def client(system: System) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(system.router.address, timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
async def redis(system: System) -> AsyncIterator[Redis]:
    redis = await connect(system.server.url)
    yield redis
    await redis.aclose()


async def lists(client: AsyncClient, *names: str) -> None:
    """Waits until the router knows exactly these decode workers."""

    async def known() -> bool:
        status = await client.status()
        return {worker.worker_id for worker in status.workers if worker.role is Role.DECODE} == set(names)

    await eventually(known, WAIT_S)


async def collect(client: AsyncClient, max_tokens: int) -> list[Piece]:
    return [piece async for piece in client.generate(PROMPT, max_tokens=max_tokens)]


async def test_from_the_first_line_to_the_last_key(system: System, client: AsyncClient, redis: Redis) -> None:
    assert (system.router.role, system.router.worker_id) == ("router", "router-0")
    with system.decode("d0"):
        assert tokens_of(await collect(client, 5)) == expected_output(PROMPT.encode(), 5)
        peers = {peer.worker_id: peer for peer in await Registry(redis, SHARD).alive()}
        assert peers["router-0"].rpc_address == system.router.address
        assert peers["router-0"].model == "toy"
    system.router.signal(signal.SIGTERM)
    status, err = await asyncio.to_thread(system.router.wait)
    assert status == 0
    assert "no session with decode worker d0" in err, "it was killed, and that is worth a line"
    assert "Traceback" not in err

    async def gone() -> bool:
        return not await Registry(redis, SHARD).alive()

    await eventually(gone, WAIT_S)
    left = {key.rpartition("}:")[2] for key in await keys_of(redis, SHARD)}
    assert left <= {"workers", "secret:resume"}, "the secret stays, for whoever is started again"


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "decode_lost"), (signal.SIGSTOP, "decode_silent")]
)
async def test_a_stream_survives_the_death_of_its_worker(
    system: System, client: AsyncClient, number: int, reason: str
) -> None:
    first = system.decode("d0")
    generation = client.generate(PROMPT, max_tokens=200)
    pieces = [await anext(generation), await anext(generation)]
    system.decode("d1")
    await lists(client, "d0", "d1")
    first.signal(number)
    pieces += [piece async for piece in generation]

    assert tokens_of(pieces) == expected_output(PROMPT.encode(), 200)
    finish = pieces[-1].finish
    assert finish
    assert finish.trail.fallbacks == {reason: 1}
    assert finish.trail.decode_worker == "d1"


async def test_a_killed_worker_that_is_started_again_serves_the_next_request(
    system: System, client: AsyncClient
) -> None:
    first = system.decode("d0")
    assert tokens_of(await collect(client, 3)) == expected_output(PROMPT.encode(), 3)
    first.signal(signal.SIGKILL)
    waiting = asyncio.create_task(collect(client, 3))
    system.decode("d0")

    assert tokens_of(await waiting) == expected_output(PROMPT.encode(), 3)


async def test_without_the_store_it_serves_on(system: System, client: AsyncClient) -> None:
    system.decode("d0")
    await lists(client, "d0")
    generation = client.generate(PROMPT, max_tokens=300)
    pieces = [await anext(generation)]
    assert system.server.pid is not None
    os.kill(system.server.pid, signal.SIGSTOP)
    try:

        async def noticed() -> bool:
            return not (await client.status()).store_available

        await eventually(noticed, WAIT_S)
        assert tokens_of(await collect(client, 5)) == expected_output(PROMPT.encode(), 5)
        pieces += [piece async for piece in generation]
        assert tokens_of(pieces) == expected_output(PROMPT.encode(), 300)
    finally:
        os.kill(system.server.pid, signal.SIGCONT)


async def test_a_store_that_lost_its_memory_hears_of_everybody_again(
    system: System, client: AsyncClient
) -> None:
    system.decode("d0")
    await lists(client, "d0")
    await asyncio.to_thread(system.server.restart)

    async def back() -> bool:
        status = await client.status()
        return status.store_available and {worker.worker_id for worker in status.workers} >= {
            "d0",
            "router-0",
        }

    await eventually(back, WAIT_S)
    assert tokens_of(await collect(client, 5)) == expected_output(PROMPT.encode(), 5)


async def test_asked_to_leave_in_the_middle_of_a_stream_it_ends_that_first(
    system: System, client: AsyncClient
) -> None:
    system.decode("d0")
    generation = client.generate(PROMPT, max_tokens=100)
    pieces = [await anext(generation)]
    system.router.signal(signal.SIGTERM)

    async def refuses() -> bool:
        try:
            await client.status()
        except Draining:
            return True
        return False

    await eventually(refuses, WAIT_S)
    pieces += [piece async for piece in generation]
    assert tokens_of(pieces) == expected_output(PROMPT.encode(), 100)
    assert await asyncio.to_thread(system.router.wait) == (0, "")


async def test_with_certificates_every_hop_is_mutual_tls(
    system: System, redis: Redis, tmp_path: Path
) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    files = {part: tmp_path / f"{part}.pem" for part in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    pair.cert_chain_pems[0].write_to_path(files["cert"])
    pair.private_key_pem.write_to_path(files["key"])
    tls = TlsSettings(files["ca"], files["cert"], files["key"], require_client_cert=True)
    flags = [text for part, path in files.items() for text in (f"--tls-{part}", str(path))]
    async with FakeDecode("d0", tls=tls) as worker:
        await Registry(redis, SHARD).register(worker.record, 600.0)
        with router_process(system.server.url, SHARD, "--worker-id", "router-1", *flags) as router:
            async with AsyncClient(router.address, timeout_s=WAIT_S, tls=tls) as client:
                assert tokens_of(await collect(client, 3)) == expected_output(PROMPT.encode(), 3)
            async with AsyncClient(router.address, timeout_s=5.0) as plain:
                with pytest.raises(PeerLost):
                    await plain.status()


async def test_a_later_start_under_the_same_name_takes_over(system: System) -> None:
    with router_process(system.server.url, SHARD):
        status, err = await asyncio.to_thread(system.router.wait)
    assert status == 1
    assert "Stale: a later start of worker router-0 has taken its name" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--redis-url", "unix:///nowhere/at/all.sock"], 1, "StoreUnavailable: the store at unix:///nowhere"),
        (["--redis-url", "http://x"], 2, "redis_url: 'http://x' must begin with redis://"),
        (["--model", "/no/such/model"], 2, "InvalidField: model: '/no/such/model' is no directory"),
        (["--max-share", "0"], 2, "router: --max-share: Input should be greater than 0"),
        (
            ["--listen", "somewhere"],
            2,
            "InvalidField: listen: cannot listen on somewhere: ",
        ),
        (["--tls-cert", "/no/cert.pem"], 2, "InvalidField: tls"),
    ],
    ids=["no store", "not a store", "no model", "a setting", "an address", "a certificate"],
)
def test_what_keeps_it_from_starting_is_one_clear_line(
    tmp_path: Path, flags: list[str], status: int, words: str
) -> None:
    with EmbeddedServer(tmp_path / "v") as server:
        found, err = refused(*router_flags(server.url, SHARD), *flags)
    assert (found, err.count("\n")) == (status, 1), err
    assert words in err


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "v") as server, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, err = refused(*router_flags(server.url, SHARD), "--listen", address)
    assert status == 2
    # gRPC's own library writes a line before ours.
    assert err.splitlines()[-1].startswith(
        f"InvalidField: listen: cannot listen on {address}: Address already in use"
    )
    assert "Traceback" not in err


def test_a_torn_model_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{", encoding="utf-8")
    with EmbeddedServer(tmp_path / "v") as server:
        status, err = refused(*router_flags(server.url, SHARD), "--model", str(model))
    assert status == 2
    assert str(model) in err
    assert "Traceback" not in err
