"""The store's part of `diptych audit`, against real stores: everything planted is found, nothing else is."""

from __future__ import annotations

import json

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import StoreUnavailable
from diptych.domain.ids import Attempt, Cell, ChunkHash, Epoch, RequestId, Tenant, WorkerId
from diptych.domain.records import PrefillJob, RequestRecord, Role, Tier, WorkerRecord
from diptych.store.audit import NAMED, PIECE, ShardAudit, ShardAuditor
from diptych.store.bus import PrefillBus
from diptych.store.directory import ChunkDirectory
from diptych.store.registry import Registry
from diptych.store.requests import RequestProjection
from diptych.store.secret import SharedSecret
from tests.support.valkey import StoreServer, paused

DECODE, PREFILL, CACHE = WorkerId("decode-0"), WorkerId("prefill-0"), WorkerId("cache-0")
NOW, BEFORE = Epoch(7), Epoch(6)
ALIVE = {(DECODE, NOW), (PREFILL, NOW), (CACHE, NOW)}


def record(name: str, epoch: Epoch = NOW, state: str = "admitted", finish_reason: str = "") -> RequestRecord:
    return RequestRecord(
        RequestId(name), Tenant(""), state, DECODE, epoch, Attempt(0), finish_reason=finish_reason
    )


def job(name: str, epoch: Epoch = NOW) -> PrefillJob:
    return PrefillJob(RequestId(name), DECODE, epoch, 300)


def chunks(count: int) -> dict[ChunkHash, Tier]:
    return {ChunkHash(number.to_bytes(16, "big")): Tier.L2 for number in range(count)}


class House:
    """One shard with everything that writes to it."""

    def __init__(self, redis: Redis, shard: str) -> None:
        self.redis = redis
        self.shard = shard
        self.prefix = f"diptych:{{{shard}}}:"
        self.auditor = ShardAuditor(redis, shard)
        self.registry = Registry(redis, shard)
        self.bus = PrefillBus(redis, shard, Cell("c"))
        self.requests = RequestProjection(redis, shard)
        self.directory = ChunkDirectory(redis, shard)

    async def look(self) -> ShardAudit:
        return await self.auditor.look(ALIVE)

    async def clear(self) -> None:
        async for key in self.redis.scan_iter(match=self.prefix + "*", count=1000):
            await self.redis.delete(key)


@pytest.fixture
async def house(redis: Redis, shard: str) -> House:
    return House(redis, shard)


async def test_an_empty_shard_has_nothing(house: House) -> None:
    assert await house.look() == ShardAudit()


async def test_what_the_living_hold_is_counted_and_no_fault(house: House) -> None:
    worker = WorkerRecord(DECODE, Role.DECODE, NOW, Cell("c"), "toy", "f", "127.0.0.1:1")
    await house.registry.register(worker, 60.0)
    await house.requests.put(record("r1"))
    await house.requests.end(record("r2", BEFORE, "ended", "stop"))
    await house.directory.succeed(CACHE, NOW)
    await house.directory.publish(CACHE, NOW, chunks(3))
    await house.bus.post(job("r1"))
    await SharedSecret(house.redis, house.shard, "resume").agree(b"s")
    audit = await house.look()
    assert audit.kinds == {
        "worker": 1, "workers": 1, "request": 2, "chunk": 3, "holds": 2, "prefill": 1, "secret": 1,
    }  # fmt: skip
    assert audit.num_requests == {"admitted": 1, "ended": 1}
    assert audit.locations == {f"{CACHE}@{NOW}": 3}
    [bus] = audit.buses
    assert (bus.cell, bus.num_waiting, bus.num_claims, bus.claims, bus.orphans) == ("c", 1, 0, (), ())
    oddities = (audit.foreign, audit.undying, audit.orphan_requests, audit.dead_holders)
    assert not any(oddities), oddities
    await house.clear()


async def test_planted_keys_are_foreign_or_undying(house: House) -> None:
    await house.redis.set(house.prefix + "plan", "b", ex=60)
    await house.redis.set(house.prefix + "request:r1", "no hash", ex=60)
    await house.redis.hset(house.prefix + "request:r2", mapping={"record": "no json"})
    await house.redis.expire(house.prefix + "request:r2", 60)
    await house.redis.hset(house.prefix + "chunk:00", mapping={f"{CACHE}@{NOW}": "l2"})
    audit = await house.look()
    assert sorted(audit.foreign) == ["plan (string)", "request:r1 (string)", "request:r2 (no record)"]
    assert audit.undying == ["chunk:00"]
    await house.clear()


async def test_what_a_dead_epoch_left_is_found(house: House) -> None:
    await house.requests.put(record("r1", BEFORE))
    await house.directory.publish(CACHE, BEFORE, chunks(2))
    await house.directory.publish(CACHE, NOW, chunks(1))
    await house.bus.post(job("r1", BEFORE))
    await house.redis.sadd(house.prefix + "holds:cache-9@1", "00")
    await house.redis.expire(house.prefix + "holds:cache-9@1", 60)
    audit = await house.look()
    assert audit.orphan_requests == [f"r1 of {DECODE}@{BEFORE}"]
    assert audit.locations == {f"{CACHE}@{BEFORE}": 2, f"{CACHE}@{NOW}": 1}
    assert audit.dead_holders == {f"{CACHE}@{BEFORE}": 2, "cache-9@1": 0}
    assert audit.buses[0].orphans == (f"r1 of {DECODE}@{BEFORE}",)
    await house.directory.sweep_worker(CACHE, BEFORE)
    assert (await house.look()).dead_holders == {"cache-9@1": 0}
    await house.clear()


async def test_claims_tell_by_whom_and_for_how_long(house: House) -> None:
    for name in ("r1", "r2", "r3"):
        await house.bus.post(job(name))
    assert await house.bus.claim(PREFILL, 0) is not None
    assert await house.bus.claim(PREFILL, 0) is not None
    [bus] = (await house.look()).buses
    assert (bus.num_waiting, bus.num_claims) == (1, 2)
    assert [(c.request_id, c.consumer, c.deliveries) for c in bus.claims] == [
        ("r1", PREFILL, 1), ("r2", PREFILL, 1),
    ]  # fmt: skip
    assert all(0 <= claim.idle_s < 20 for claim in bus.claims)
    await house.clear()


async def test_an_entry_that_is_no_job_belongs_to_nobody(house: House) -> None:
    entry = await house.redis.xadd(house.prefix + "prefill:c", {"job": json.dumps({}), "deliveries": "1"})
    [bus] = (await house.look()).buses
    assert bus.orphans == (f"{entry.decode()} of nobody",)
    await house.clear()


async def test_many_keys_are_read_in_pieces_and_named_up_to_a_bound(house: House) -> None:
    await house.directory.publish(CACHE, NOW, chunks(3 * PIECE))
    for number in range(NAMED + 5):
        await house.redis.set(f"{house.prefix}odd-{number}", "x", ex=60)
    audit = await house.look()
    assert (audit.kinds["chunk"], audit.truncated) == (3 * PIECE, False)
    assert len(audit.foreign) == NAMED
    few = await ShardAuditor(house.redis, "main", max_keys=1).look(ALIVE)
    assert not few.truncated, "another shard is not looked at"
    house.auditor._max_keys = PIECE
    assert (await house.look()).truncated
    await house.clear()


async def test_a_shards_name_is_no_pattern(redis: Redis) -> None:
    await redis.set("diptych:{axb}:plan", "x", ex=60)
    assert await ShardAuditor(redis, "a?b").look(ALIVE) == ShardAudit()
    assert (await ShardAuditor(redis, "axb").look(ALIVE)).foreign == ["plan (string)"]
    await redis.delete("diptych:{axb}:plan")


async def test_a_store_that_does_not_answer(redis: Redis, store_server: StoreServer) -> None:
    auditor = ShardAuditor(redis, "silent", timeout_s=0.1)
    with paused(store_server), pytest.raises(StoreUnavailable):
        await auditor.look(ALIVE)
