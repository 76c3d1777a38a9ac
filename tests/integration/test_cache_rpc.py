"""The cache over gRPC, with a real store: what callers see, and what no message of theirs can do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from diptych.domain.errors import DiptychError, Draining, InvalidField, LayoutMismatch, StoreUnavailable
from diptych.domain.ids import Cell, ChunkHash, Epoch, WorkerId
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.records import ChannelEndpoint, ChunkLocation, Role, Tier, WorkerRecord
from diptych.rpc.chunks import CacheClient, Lent, Missed, Offered
from diptych.rpc.dial import Dialer
from diptych.rpc.kv_codec import piece_to_proto
from diptych.rpc.status import from_rpc_error
from diptych.store.connect import connect
from diptych.store.directory import ChunkDirectory
from diptych.store.embedded import EmbeddedServer
from diptych.store.registry import Registry
from diptych.transfer.faults import Faults
from diptych.transfer.memory import MemoryFabric
from diptych.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.cache.arena import ALIGN
from services.cache.config import CacheSettings
from services.cache.service import CacheService
from tests.support.cache_rig import FINGERPRINT, NUM_TOKENS, OTHER_FINGERPRINT, WAIT_S, Offering, Worker
from tests.support.valkey import eventually, keys_of

UNITS = 4
SHARD = "test"


class Rig:
    """A cache service in this process, on a memory channel with faults; a registered worker; a caller."""

    def __init__(self, server: EmbeddedServer, redis: Redis, settings: CacheSettings) -> None:
        self.server = server
        self.redis = redis
        self.fabric, self.faults = MemoryFabric(), Faults()
        self.service = CacheService(settings, redis, self.fabric.open(faults=self.faults))
        self.worker = Worker(self.fabric.open())
        self.registry = Registry(redis, SHARD)
        self.directory = ChunkDirectory(redis, SHARD)
        self.dialer = Dialer()
        self.client = CacheClient(self.dialer)
        self.has_left = False

    async def start(self) -> None:
        region = self.worker.region
        mine = WorkerRecord(
            WorkerId("decode"),
            Role.DECODE,
            Epoch(1),
            Cell("main"),
            "toy",
            FINGERPRINT,
            "127.0.0.1:1",
            (ChannelEndpoint(region.kind, region.address),),
        )
        await self.registry.register(mine, 600.0)
        await self.service.start()

    async def leave(self) -> None:
        self.has_left = True
        await self.service.leave()

    async def close(self) -> None:
        if not self.has_left:
            await self.leave()
        await asyncio.to_thread(self.worker.channel.close)
        await self.dialer.close()

    @property
    def stub(self) -> Any:
        return cache_pb2_grpc.CacheStub(self.dialer.channel(self.service.address))

    @property
    def inspector(self) -> Any:
        return worker_pb2_grpc.WorkerStub(self.dialer.channel(self.service.address))

    async def offer(self, offering: Offering, fingerprint: str = FINGERPRINT) -> Offered:
        return await self.client.offer(
            self.service.address,
            chunk_hash=offering.name,
            fingerprint=fingerprint,
            num_tokens=NUM_TOKENS,
            piece=offering.piece,
            digest=offering.digest,
            timeout_s=WAIT_S,
        )

    async def lend(self, offering: Offering, fingerprint: str = FINGERPRINT) -> Lent | Missed:
        return await self.client.lend(
            self.service.address,
            chunk_hash=offering.name,
            fingerprint=fingerprint,
            lease_s=60.0,
            timeout_s=WAIT_S,
        )

    async def give_back(self, lease_id: int) -> bool:
        return await self.client.give_back(self.service.address, lease_id, timeout_s=WAIT_S)

    async def located(self, *offerings: Offering) -> set[ChunkHash]:
        alive = {(peer.worker_id, peer.epoch) for peer in await self.registry.alive()}
        return set(await self.directory.locate([offering.name for offering in offerings], alive))

    async def status(self) -> worker_pb2.WorkerStatus:
        return await self.inspector.Inspect(worker_pb2.InspectRequest(), timeout=WAIT_S)


Make = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """`await make(**settings)`: a started rig, which leaves no key behind."""
    with EmbeddedServer(tmp_path / "v") as server:
        async with AsyncExitStack() as stack:
            redis = await connect(server.url)
            stack.push_async_callback(redis.aclose)

            async def start(**rest: object) -> Rig:
                told = {"worker_id": "cache", "budget_bytes": UNITS * ALIGN, "drain_s": 5.0, **rest}
                rig = Rig(server, redis, CacheSettings(redis_url=server.url, shard=SHARD, **told))
                stack.push_async_callback(rig.close)
                await rig.start()
                return rig

            yield start
            await stack.aclose()
            async with await connect(server.url) as last:
                await Registry(last, SHARD).deregister(WorkerId("decode"), Epoch(1))
                left = [key for key in await keys_of(last, SHARD) if not key.endswith(":workers")]
            assert left == []


async def test_a_chunk_from_offer_to_give_back(make: Make) -> None:
    rig = await make()
    offering = rig.worker.chunk(0)
    assert await rig.offer(offering) == Offered(True, "stored")
    assert await rig.offer(offering) == Offered(False, "not_wanted")
    mine = (WorkerId("cache"), rig.service.epoch)

    async def is_located() -> bool:
        found = await rig.directory.locate([offering.name], {mine})
        return found == {offering.name: (ChunkLocation(*mine, Tier.L2),)}

    await eventually(is_located)
    lent = await rig.lend(offering)
    assert isinstance(lent, Lent)
    assert (lent.num_tokens, lent.digest) == (NUM_TOKENS, offering.digest)
    assert await rig.worker.read(lent.piece) == offering.data
    status = await rig.status()
    assert (status.load.slots_used, status.load.bytes_used, status.load.bytes_total) == (
        1,
        ALIGN,
        UNITS * ALIGN,
    )
    assert (status.worker_id, status.role, status.epoch) == (
        "cache",
        worker_pb2.ROLE_CACHE,
        rig.service.epoch,
    )
    assert {c.reason: c.count for c in status.counters} == {"lend_hit": 1, "offer_held": 1, "offer_stored": 1}
    assert (await rig.inspector.DropCache(worker_pb2.DropCacheRequest())).num_dropped == 0
    assert await rig.give_back(lent.lease_id)
    assert (await rig.inspector.DropCache(worker_pb2.DropCacheRequest())).num_dropped == 1
    assert await rig.lend(offering) == Missed("absent")
    assert (await rig.status()).load.bytes_used == 0

    async def is_withdrawn() -> bool:
        return not await rig.located(offering)

    await eventually(is_withdrawn)


async def test_failures_come_back_as_a_reason(make: Make) -> None:
    rig = await make()
    rig.faults.corrupt(1)
    rig.faults.fail(2)
    assert await rig.offer(rig.worker.chunk(0)) == Offered(False, "DigestMismatch")
    assert await rig.offer(rig.worker.chunk(0)) == Offered(False, "TransferFailed")
    assert await rig.lend(rig.worker.chunk(0)) == Missed("absent")
    assert await rig.offer(rig.worker.chunk(0)) == Offered(True, "stored")
    assert await rig.offer(rig.worker.chunk(0), OTHER_FINGERPRINT) == Offered(False, "LayoutMismatch")
    assert await rig.lend(rig.worker.chunk(0), OTHER_FINGERPRINT) == Missed("absent")
    stranger = Worker(rig.fabric.open())
    assert await rig.offer(stranger.chunk(1)) == Offered(False, "InvalidField")
    await asyncio.to_thread(stranger.channel.close)


async def test_a_cache_that_is_gone_is_a_miss(make: Make) -> None:
    rig = await make()
    await rig.leave()
    assert await rig.offer(rig.worker.chunk(0)) == Offered(False, "PeerLost")
    assert await rig.lend(rig.worker.chunk(0)) == Missed("PeerLost")
    assert not await rig.give_back(1)


async def test_a_deadline_bounds_the_read(make: Make) -> None:
    rig = await make(read_s=0.05)
    rig.faults.drop(1)
    assert await rig.offer(rig.worker.chunk(0)) == Offered(False, "TransferFailed")
    assert (await rig.status()).load.bytes_used == 0


async def test_the_callers_deadline_bounds_the_read_too(make: Make) -> None:
    rig = await make()
    rig.faults.drop(1)
    offering = rig.worker.chunk(0)
    offered = await rig.client.offer(
        rig.service.address,
        chunk_hash=offering.name,
        fingerprint=FINGERPRINT,
        num_tokens=NUM_TOKENS,
        piece=offering.piece,
        digest=offering.digest,
        timeout_s=0.1,
    )
    assert offered.reason in {"DeadlineExceeded", "TransferFailed"}  # both ends hold it; either may be first

    async def is_over() -> bool:
        return (await rig.status()).load.bytes_used == 0

    await eventually(is_over)


def offer_request(offering: Offering, **changed: Any) -> cache_pb2.OfferRequest:
    told: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "chunk_hash": offering.name,
        "fingerprint": FINGERPRINT,
        "num_tokens": NUM_TOKENS,
        "piece": piece_to_proto(offering.piece),
        "digest": offering.digest,
    }
    return cache_pb2.OfferRequest(**{**told, **changed})


def resized(offering: Offering, offset: int, num_bytes: int, region_bytes: int = 1 << 40) -> Any:
    piece = piece_to_proto(offering.piece)
    piece.offset, piece.num_bytes, piece.region.num_bytes = offset, num_bytes, region_bytes
    return piece


BAD_OFFERS: dict[str, tuple[Callable[[Offering], dict[str, Any]], type[DiptychError], str]] = {
    "no wire version": (lambda _: {"wire_version": 0}, LayoutMismatch, "wire version"),
    "later wire version": (lambda _: {"wire_version": WIRE_VERSION + 1}, LayoutMismatch, "wire version"),
    "no fingerprint": (lambda _: {"fingerprint": ""}, LayoutMismatch, "fingerprint"),
    "fingerprint with a line end": (
        lambda _: {"fingerprint": FINGERPRINT + "\n"},
        LayoutMismatch,
        "fingerprint",
    ),
    "fingerprint of letters": (lambda _: {"fingerprint": "z" * 32}, LayoutMismatch, "fingerprint"),
    "no hash": (lambda _: {"chunk_hash": b""}, InvalidField, "chunk_hash"),
    "long hash": (lambda _: {"chunk_hash": bytes(17)}, InvalidField, "chunk_hash"),
    "short digest": (lambda _: {"digest": bytes(15)}, InvalidField, "digest"),
    "no tokens": (lambda _: {"num_tokens": 0}, InvalidField, "num_tokens"),
    "too many tokens": (lambda _: {"num_tokens": 257}, InvalidField, "num_tokens"),
    "no piece": (lambda _: {"piece": None}, InvalidField, "piece"),
    "no bytes": (lambda o: {"piece": resized(o, 0, 0)}, InvalidField, "piece.num_bytes"),
    "over the budget": (
        lambda o: {"piece": resized(o, 0, UNITS * ALIGN + 1)},
        InvalidField,
        "piece.num_bytes",
    ),
    "past its region": (lambda o: {"piece": resized(o, 1, 64, 64)}, InvalidField, "piece.offset"),
    "oversize": (lambda o: {"piece": resized(o, 0, 2**64 - 1, 2**64 - 1)}, InvalidField, "piece"),
}


@pytest.mark.parametrize("case", BAD_OFFERS)
async def test_a_bad_offer_changes_nothing(make: Make, case: str) -> None:
    rig = await make()
    changed, error, words = BAD_OFFERS[case]
    offering = rig.worker.chunk(0)
    with pytest.raises(grpc.RpcError) as raised:
        await rig.stub.Offer(offer_request(offering, **changed(offering)))
    refused = from_rpc_error(raised.value)
    assert type(refused) is error
    assert words in str(refused)
    assert rig.faults.num_reads == 0
    assert (await rig.status()).load.bytes_used == 0


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"fingerprint": "x"}, LayoutMismatch, "fingerprint"),
        ({"chunk_hash": bytes(15)}, InvalidField, "chunk_hash"),
        ({"lease_s": 0.0}, InvalidField, "lease_s"),
        ({"lease_s": -1.0}, InvalidField, "lease_s"),
        ({"lease_s": math.nan}, InvalidField, "lease_s"),
        ({"lease_s": math.inf}, InvalidField, "lease_s"),
    ],
)
async def test_a_bad_loan_is_refused(
    make: Make, changed: dict[str, Any], error: type[DiptychError], words: str
) -> None:
    rig = await make()
    told = {"chunk_hash": bytes(16), "fingerprint": FINGERPRINT, "lease_s": 1.0, **changed}
    with pytest.raises(grpc.RpcError) as raised:
        await rig.stub.Lend(cache_pb2.LendRequest(**told))
    refused = from_rpc_error(raised.value)
    assert type(refused) is error
    assert words in str(refused)


async def test_leases_of_nobody_are_given_back_harmlessly(make: Make) -> None:
    rig = await make()
    await rig.offer(rig.worker.chunk(0))
    lent = await rig.lend(rig.worker.chunk(0))
    assert isinstance(lent, Lent)
    for lease_id in (0, 1, lent.lease_id ^ 1, 2**64 - 1):
        assert await rig.give_back(lease_id)
    assert (await rig.status()).load.slots_used == 1
    assert await rig.give_back(lent.lease_id)
    assert await rig.give_back(lent.lease_id)
    assert (await rig.status()).load.slots_used == 0


async def test_leaving_waits_for_loans_and_takes_nothing_more(make: Make) -> None:
    rig = await make(drain_s=WAIT_S)
    offering = rig.worker.chunk(0)
    await rig.offer(offering)
    lent = await rig.lend(offering)
    assert isinstance(lent, Lent)
    leaving = asyncio.create_task(rig.leave())

    async def is_withdrawn() -> bool:
        return not await rig.located(offering)

    await eventually(is_withdrawn)
    assert await rig.offer(rig.worker.chunk(1)) == Offered(False, Draining.__name__)
    assert await rig.lend(offering) == Missed(Draining.__name__)
    assert await rig.worker.read(lent.piece) == offering.data
    assert "cache" in {peer.worker_id for peer in await rig.registry.alive()}
    assert not leaving.done()
    assert await rig.give_back(lent.lease_id)
    async with asyncio.timeout(WAIT_S):
        await leaving
    assert {peer.worker_id for peer in await rig.registry.alive()} == {"decode"}


async def test_leaving_is_bounded_when_a_borrower_died(make: Make) -> None:
    rig = await make(drain_s=0.05)
    await rig.offer(rig.worker.chunk(0))
    assert isinstance(await rig.lend(rig.worker.chunk(0)), Lent)
    async with asyncio.timeout(WAIT_S):
        await rig.leave()


async def test_a_flushed_store_hears_of_every_chunk_again(make: Make) -> None:
    rig = await make(heartbeat_s=0.02)
    offerings = [rig.worker.chunk(index) for index in range(3)]
    for offering in offerings:
        await rig.offer(offering)

    async def all_located() -> bool:
        return await rig.located(*offerings) == {offering.name for offering in offerings}

    await eventually(all_located)
    await rig.redis.flushall()
    await eventually(all_located)


async def test_without_its_store_it_still_serves_and_is_found_again_with_it(make: Make) -> None:
    rig = await make(heartbeat_s=0.02, ttl_s=0.2)
    await asyncio.to_thread(rig.server.stop)

    async def is_alone() -> bool:
        return not rig.service.membership.available

    await eventually(is_alone)
    offering = rig.worker.chunk(0)
    assert await rig.offer(offering) == Offered(True, "stored")
    assert isinstance(lent := await rig.lend(offering), Lent)
    assert await rig.give_back(lent.lease_id)
    await asyncio.to_thread(rig.server.start)

    async def is_found() -> bool:
        try:
            return bool(await rig.located(offering))
        except StoreUnavailable:
            return False

    await eventually(is_found)
