"""The cache as a process, with a real channel and store: started, asked, stopped, killed, replaced."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from redis.asyncio import Redis

from diptych.domain.errors import PeerError
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.ports import RemotePiece
from diptych.domain.records import WorkerRecord
from diptych.rpc.chunks import CacheClient, Lent, Missed, Offered
from diptych.rpc.dial import Dialer
from diptych.rpc.tls import TlsSettings
from diptych.store.connect import connect
from diptych.store.directory import ChunkDirectory
from diptych.store.embedded import EmbeddedServer
from diptych.store.registry import Registry
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.open import open_channel
from tests.support.cache_process import CacheProcess, free_port, refused, source_record
from tests.support.cache_rig import FINGERPRINT, NUM_TOKENS, WAIT_S, Offering, Worker
from tests.support.valkey import eventually, keys_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SHARD = "test"
CHUNK_BYTES = 256 * 1024
FLAGS = ("--shard", SHARD, "--budget-bytes", "4MiB", "--heartbeat-s", "0.05", "--ttl-s", "1")


class Caller:
    """A worker process, seen from the cache: it offers, borrows and reads."""

    def __init__(self, url: str, redis: Redis, tls: TlsSettings | None = None) -> None:
        self.flags = ("--redis-url", url, *FLAGS)
        self.redis = redis
        self.registry = Registry(redis, SHARD)
        self.directory = ChunkDirectory(redis, SHARD)
        channel_tls = tls and ChannelTls(tls.server_credentials(), tls.channel_credentials())
        self.worker = Worker(open_channel("grpc", "127.0.0.1", 0, tls=channel_tls), chunk_bytes=CHUNK_BYTES)
        self.dialer = Dialer(tls)
        self.client = CacheClient(self.dialer)

    async def offer(self, cache: CacheProcess, offering: Offering) -> Offered:
        return await self.client.offer(
            cache.address,
            chunk_hash=offering.name,
            fingerprint=FINGERPRINT,
            num_tokens=NUM_TOKENS,
            piece=offering.piece,
            digest=offering.digest,
            timeout_s=WAIT_S,
        )

    async def lend(self, cache: CacheProcess, offering: Offering) -> Lent | Missed:
        return await self.client.lend(
            cache.address, chunk_hash=offering.name, fingerprint=FINGERPRINT, lease_s=60.0, timeout_s=WAIT_S
        )

    async def record(self, worker_id: str) -> WorkerRecord:
        (found,) = [peer for peer in await self.registry.alive() if peer.worker_id == worker_id]
        return found

    async def located(self, offering: Offering) -> set[Epoch]:
        """The epochs of living processes that hold a chunk."""
        alive = {(peer.worker_id, peer.epoch) for peer in await self.registry.alive()}
        found = await self.directory.locate([offering.name], alive)
        return {location.epoch for location in found.get(offering.name, ())}

    async def close(self) -> None:
        await self.dialer.close()
        await asyncio.to_thread(self.worker.channel.close)


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[tuple[str, Redis]]:
    with EmbeddedServer(tmp_path / "v") as server:
        redis = await connect(server.url)
        yield server.url, redis
        await redis.aclose()


@pytest.fixture
async def caller(redis: tuple[str, Redis]) -> AsyncIterator[Caller]:
    caller = Caller(*redis)
    await caller.registry.register(source_record(caller.worker.region), 600.0)
    yield caller
    await caller.close()


async def test_from_the_first_line_to_the_last_key(caller: Caller) -> None:
    offering = caller.worker.chunk(0)
    with CacheProcess(*caller.flags, "--worker-id", "mine") as cache:
        assert cache.worker_id == "mine"
        assert (await caller.record("mine")).rpc_address == cache.address
        assert await caller.offer(cache, offering) == Offered(True, "stored")

        async def is_located() -> bool:
            return bool(await caller.located(offering))

        await eventually(is_located)
        lent = await caller.lend(cache, offering)
        assert isinstance(lent, Lent)
        assert lent.piece.region.address in {c.address for c in (await caller.record("mine")).channels}
        assert await caller.worker.read(lent.piece) == offering.data
        assert await caller.client.give_back(cache.address, lent.lease_id, timeout_s=WAIT_S)
        assert await asyncio.to_thread(cache.end, signal.SIGTERM) == (0, "")
    assert await keys_of(caller.redis, SHARD) == [
        caller.registry._shard.key("worker", "decode"),
        caller.registry._shard.key("workers"),
    ]


async def test_after_a_kill_nobody_believes_the_old_process(caller: Caller) -> None:
    offering = caller.worker.chunk(0)
    ports = ("--worker-id", "mine", "--listen", f"127.0.0.1:{free_port()}", "--kv-port", f"{free_port()}")
    with CacheProcess(*caller.flags, *ports) as cache:
        assert (await caller.offer(cache, offering)).stored
        old = await caller.lend(cache, offering)
        assert isinstance(old, Lent)
        old_epoch = (await caller.record("mine")).epoch
        await asyncio.to_thread(cache.end, signal.SIGKILL)
    assert await caller.lend(cache, offering) == Missed("PeerLost")
    with CacheProcess(*caller.flags, *ports) as again:
        assert again.address == cache.address
        assert (await caller.record("mine")).epoch != old_epoch
        assert await caller.located(offering) == set()
        # Calls fail fast while the connection that the kill broke waits for its next attempt.
        await eventually(lambda: caller.client.give_back(again.address, old.lease_id, timeout_s=WAIT_S))
        assert isinstance(await caller.worker.read(old.piece), PeerError)
        assert await caller.lend(again, offering) == Missed("absent")
        assert (await caller.offer(again, offering)).stored
        lent = await caller.lend(again, offering)
        assert isinstance(lent, Lent)
        assert await caller.worker.read(lent.piece) == offering.data


async def test_a_later_start_takes_the_name(caller: Caller) -> None:
    with CacheProcess(*caller.flags, "--worker-id", "mine") as old:
        with CacheProcess(*caller.flags, "--worker-id", "mine") as new:
            status, words = await asyncio.to_thread(old.wait)
            assert status == 1
            assert "Stale" in words
            assert (await caller.record("mine")).rpc_address == new.address


async def test_leaving_is_bounded_by_a_source_that_stands_still(caller: Caller) -> None:
    with socket.create_server(("127.0.0.1", 0)) as still:  # accepts, and never says a word
        region = replace(caller.worker.region, address=f"127.0.0.1:{still.getsockname()[1]}")
        await caller.registry.register(replace(source_record(region), worker_id=WorkerId("still")), 600.0)
        offering = caller.worker.chunk(0)
        stalled = replace(offering, piece=RemotePiece(region, 0, CHUNK_BYTES))
        with CacheProcess(*caller.flags, "--drain-s", "0.2", "--read-s", "600") as cache:
            offer = asyncio.create_task(caller.offer(cache, stalled))
            connection, _ = await asyncio.to_thread(still.accept)
            with connection:
                status, _ = await asyncio.to_thread(cache.end, signal.SIGTERM)
                assert status == 0
                assert not (await offer).stored


async def test_mutual_tls_on_both_doors(redis: tuple[str, Redis], tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    files = {part: tmp_path / f"{part}.pem" for part in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    pair.cert_chain_pems[0].write_to_path(files["cert"])
    pair.private_key_pem.write_to_path(files["key"])
    tls = TlsSettings(files["ca"], files["cert"], files["key"], require_client_cert=True)
    caller, plain = Caller(*redis, tls), Caller(*redis)
    await caller.registry.register(source_record(caller.worker.region), 600.0)
    flags = [text for part, path in files.items() for text in (f"--tls-{part}", str(path))]
    offering = caller.worker.chunk(0)
    with CacheProcess(*caller.flags, *flags) as cache:
        assert await plain.offer(cache, offering) == Offered(False, "PeerLost")
        assert await caller.offer(cache, offering) == Offered(True, "stored")
        lent = await caller.lend(cache, offering)
        assert isinstance(lent, Lent)
        assert await caller.worker.read(lent.piece) == offering.data
        assert isinstance(await plain.worker.read(lent.piece), PeerError)
    await caller.close()
    await plain.close()


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("--budget-bytes", "0"), 2, "--budget-bytes"),
        (("--budget-bytes", "1000TiB"), 2, "--budget-bytes"),
        (("--budget-bytes", "much"), 2, "--budget-bytes"),
        (("--channel", "pigeon"), 2, "--channel"),
        (("--listen", "127.0.0.1:99999"), 2, "listen"),
        (("--listen", "0.0.0.0:0"), 2, "advertise"),
        (("--tls-cert", "missing.pem", "--tls-key", "missing.pem"), 2, "missing.pem"),
        (("--redis-url", "redis://127.0.0.1:1"), 1, "redis://127.0.0.1:1"),
        (("--redis-url", "http://127.0.0.1"), 2, "redis_url"),
    ],
)
async def test_a_bad_start_says_what_is_wrong(
    redis: tuple[str, Redis], flags: tuple[str, ...], status: int, words: str
) -> None:
    ended, said = await asyncio.to_thread(refused, "--redis-url", redis[0], *flags)
    assert ended == status
    assert words in said


async def test_a_taken_port_is_named(redis: tuple[str, Redis]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag, value in (("--listen", f"127.0.0.1:{port}"), ("--kv-port", f"{port}")):
            status, said = await asyncio.to_thread(refused, "--redis-url", redis[0], flag, value)
            assert status == 2
            assert str(port) in said
