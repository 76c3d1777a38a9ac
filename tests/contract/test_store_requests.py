"""The projection of a request: who may write, and when it goes."""

import dataclasses
import itertools

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import Stale
from diptych.domain.ids import Attempt, Epoch, RequestId, Tenant, WorkerId
from diptych.domain.records import RequestRecord
from diptych.store import requests
from diptych.store.requests import RequestProjection, Standing
from tests.support.valkey import eventually, keys_of

R1 = RequestId("r1")


def record(placement: int = 1, version: int = 1, worker: str = "d0", epoch: int = 7) -> RequestRecord:
    return RequestRecord(
        request_id=R1,
        tenant=Tenant("t"),
        state="RUNNING",
        decode_worker=WorkerId(worker),
        decode_epoch=Epoch(epoch),
        attempt=Attempt(1),
        placement=placement,
        version=version,
    )


@pytest.fixture
def projection(redis: Redis, shard: str) -> RequestProjection:
    return RequestProjection(redis, shard, ended_ttl_s=0.05)


async def end(projection: RequestProjection, last: RequestRecord) -> None:
    """Brings the request to its end and waits until nothing is left of it."""
    await projection.end(last)

    async def is_gone() -> bool:
        return await projection.get(R1) is None

    await eventually(is_gone)


async def test_the_newest_version_is_read(projection: RequestProjection) -> None:
    assert await projection.get(R1) is None
    await projection.put(record(version=1))
    newest = dataclasses.replace(
        record(version=2), state="FINISHED", num_output_tokens=9, finish_reason="stop"
    )
    await projection.put(newest)

    assert await projection.get(R1) == newest
    await end(projection, record(version=3))


async def test_the_same_record_may_come_twice(projection: RequestProjection) -> None:
    await projection.put(record())
    await projection.put(record())
    with pytest.raises(Stale):
        await projection.put(dataclasses.replace(record(), state="FAILED"))
    await end(projection, record(version=2))


@pytest.mark.parametrize(
    "late",
    [
        record(placement=2, version=4),
        record(placement=1, version=99),
        record(placement=2, version=6, epoch=8),
        record(placement=2, version=6, worker="d1"),
    ],
    ids=["old version", "old placement", "other epoch", "other worker"],
)
async def test_a_late_writer_changes_nothing(projection: RequestProjection, late: RequestRecord) -> None:
    current = record(placement=2, version=5)
    await projection.put(current)

    for write in (projection.put, projection.end):
        with pytest.raises(Stale, match="comes too late"):
            await write(late)
    assert await projection.get(R1) == current
    await end(projection, record(placement=2, version=6))


async def test_a_new_placement_takes_over(projection: RequestProjection) -> None:
    await projection.put(record(placement=1, version=40))
    moved = record(placement=2, version=1, worker="d1", epoch=9)
    await projection.put(moved)

    assert await projection.get(R1) == moved
    await end(projection, record(placement=2, version=2, worker="d1", epoch=9))


async def test_of_two_that_take_over_one_wins(projection: RequestProjection) -> None:
    await projection.put(record(placement=2, worker="d1"))
    with pytest.raises(Stale):
        await projection.put(record(placement=2, worker="d2"))
    await end(projection, record(placement=2, version=2, worker="d1"))


async def test_order_of_arrival_does_not_matter(projection: RequestProjection) -> None:
    """Whatever comes first, even to a store that has just forgotten: the last word is the newest one's."""
    writes = [record(1, 1), record(1, 2), record(2, 1, "d1"), record(2, 2, "d1")]
    for order in itertools.permutations(writes):
        for write in order:
            try:
                await projection.put(write)
            except Stale:
                continue
        assert await projection.get(R1) == writes[-1]
        await end(projection, record(3, 1))


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"{}"])
async def test_an_unreadable_record_is_none(
    projection: RequestProjection, redis: Redis, shard: str, garbage: bytes
) -> None:
    key = f"diptych:{{{shard}}}:request:r1"
    await redis.hset(key, "record", garbage)
    assert await projection.get(R1) is None
    await redis.set(key, garbage)
    assert await projection.get(R1) is None

    await projection.put(record())
    assert await projection.get(R1) == record()
    await end(projection, record(version=2))


D0, E7 = WorkerId("d0"), Epoch(7)


async def is_gone(projection: RequestProjection) -> bool:
    return await projection.get(R1) is None


async def test_a_record_lives_as_long_as_its_owner_renews_it(redis: Redis, shard: str) -> None:
    long, short = (RequestProjection(redis, shard, running_ttl_s=ttl_s) for ttl_s in (60.0, 0.05))
    assert long.renew_s == 15.0
    await long.put(record())
    key = f"diptych:{{{shard}}}:request:r1"
    await redis.pexpire(key, 10_000)
    assert await long.renew(D0, E7, [R1]) == {R1: Standing.OURS}
    assert await redis.pttl(key) > 50_000
    assert await long.get(R1) == record(), "renewing changes nothing of it"

    assert await short.renew(D0, E7, [R1]) == {R1: Standing.OURS}
    await eventually(lambda: is_gone(long))
    assert await long.renew(D0, E7, [R1]) == {R1: Standing.GONE}


async def test_only_its_owner_renews_it(redis: Redis, shard: str) -> None:
    projection = RequestProjection(redis, shard, running_ttl_s=60.0, ended_ttl_s=0.05)
    hasty = RequestProjection(redis, shard, running_ttl_s=0.05)
    await projection.put(record(placement=2, worker="d1", epoch=9))
    for worker, epoch in (("d0", 9), ("d1", 7), ("d1", 99), ("", 0)):
        found = await hasty.renew(WorkerId(worker), Epoch(epoch), [R1])
        assert found == {R1: Standing.TAKEN}
    left_ms = await redis.pttl(f"diptych:{{{shard}}}:request:r1")
    assert left_ms > 10_000, "nobody else has changed how long it lives"
    await end(projection, record(placement=2, version=2, worker="d1", epoch=9))


async def test_many_are_renewed_in_pieces(redis: Redis, shard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RENEW_PIECE", 3)
    projection = RequestProjection(redis, shard, running_ttl_s=60.0)
    names = [RequestId(f"r{number}") for number in range(8)]
    for name in names[::2]:
        await projection.put(dataclasses.replace(record(), request_id=name))
    await redis.set(f"diptych:{{{shard}}}:request:r1", "no hash")
    found = await projection.renew(D0, E7, names)
    assert found == {
        name: Standing.GONE if number % 2 else Standing.OURS for number, name in enumerate(names)
    }
    assert await projection.renew(D0, E7, []) == {}
    await redis.delete(*await keys_of(redis, shard))
