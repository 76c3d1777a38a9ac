"""The projection of a request: who may write, and when it goes."""

import dataclasses
import itertools

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import Stale
from diptych.domain.ids import Attempt, Epoch, RequestId, Tenant, WorkerId
from diptych.domain.records import RequestRecord
from diptych.store.requests import RequestProjection
from tests.support.valkey import eventually

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
