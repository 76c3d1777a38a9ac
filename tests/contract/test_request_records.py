"""What a decode worker tells the store of its requests lasts as long as the worker does, and not longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from redis.asyncio import Redis

from diptych.domain.ids import Attempt, Cell, Epoch, RequestId, Tenant, WorkerId
from diptych.domain.records import RequestRecord
from diptych.store.bus import PrefillBus
from diptych.store.requests import RequestProjection
from services.decode.jobs import JobBoard
from tests.support.valkey import eventually, keys_of

DECODE, EPOCH = WorkerId("d0"), Epoch(7)
NAMES = [RequestId(f"r{number}") for number in range(20)]
TTL_S = 1.0


def record(name: RequestId, placement: int = 1, epoch: Epoch = EPOCH) -> RequestRecord:
    return RequestRecord(name, Tenant("t"), "admitted", DECODE, epoch, Attempt(0), placement)


class House:
    """One decode worker's board, and how the store sees its requests."""

    def __init__(self, redis: Redis, shard: str) -> None:
        self.redis = redis
        self.shard = shard
        self.projection = RequestProjection(redis, shard, running_ttl_s=TTL_S, ended_ttl_s=0.05)
        bus = PrefillBus(redis, shard, Cell("c"))
        self.board = JobBoard(bus, self.projection, DECODE, EPOCH, lambda _: None, lambda *_: None)
        self.lives = True

    async def live(self) -> None:
        """As the worker's own loop does."""
        while self.lives:
            self.board.renew()
            await asyncio.sleep(TTL_S / 20)

    async def known(self) -> set[str]:
        """Requests of which the store has a record."""
        return {key.rpartition(":")[2] for key in await keys_of(self.redis, self.shard)}

    async def knows(self, *names: RequestId) -> None:
        async def same() -> bool:
            return await self.known() == set(names)

        await eventually(same)


@pytest.fixture
async def house(redis: Redis, shard: str) -> AsyncIterator[House]:
    house = House(redis, shard)
    living = asyncio.create_task(house.live())
    yield house
    house.lives = False
    await living
    await house.board.close()
    await house.knows()


async def renewed(house: House, name: RequestId) -> None:
    """Returns when the record would be gone, had nobody renewed it."""
    key = f"diptych:{{{house.shard}}}:request:{name}"
    left_ms = [await house.redis.pttl(key)]

    async def went_up_often() -> bool:
        left_ms.append(await house.redis.pttl(key))
        return sum(after > before for before, after in pairwise(left_ms)) >= 5

    await eventually(went_up_often)
    assert min(left_ms) > 0


async def test_the_records_of_live_requests_outlast_their_ttl(house: House) -> None:
    for name in NAMES:
        house.board.admitted(record(name))
    await house.knows(*NAMES)
    await renewed(house, NAMES[0])
    assert await house.known() == set(NAMES)
    for name in NAMES:
        house.board.ended(name, "ended", 3, "stop")
    await house.knows()


async def test_those_of_a_dead_worker_are_gone_soon(house: House) -> None:
    for name in NAMES:
        house.board.admitted(record(name))
    await house.knows(*NAMES)
    house.lives = False
    await house.knows()


async def test_what_the_store_has_lost_comes_back(house: House) -> None:
    house.board.admitted(record(NAMES[0]))
    await house.knows(NAMES[0])
    await house.redis.delete(*await keys_of(house.redis, house.shard))
    await house.knows(NAMES[0])
    assert await house.projection.get(NAMES[0]) == record(NAMES[0])
    house.board.ended(NAMES[0], "ended", 3, "stop")


async def test_a_request_that_another_has_taken_over_is_let_go_of(house: House) -> None:
    house.board.admitted(record(NAMES[0]))
    await house.knows(NAMES[0])
    moved = record(NAMES[0], placement=2, epoch=Epoch(8))
    await house.projection.put(moved)
    assert await house.projection.get(NAMES[0]) == moved
    # Nobody renews it any more: its new owner is not there, and the old one must not.
    await house.knows()
    house.board.ended(NAMES[0], "ended", 3, "stop")
    assert await house.known() == set()
