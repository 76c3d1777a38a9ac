"""Jobs that nobody will begin: a worker that claimed one and stopped, a store that lost one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from diptych.domain.fallbacks import Fallback
from diptych.domain.ids import Cell, Epoch, RequestId, WorkerId
from diptych.store.bus import PrefillBus
from diptych.store.requests import RequestProjection
from services.decode.jobs import CLAIM_S, JobBoard
from services.decode.messages import JobPosted
from tests.support.valkey import DEADLINE_S, StoreServer, eventually, paused

A, B = RequestId("a"), RequestId("b")
WAIT_MS = round(DEADLINE_S * 1000)


class House:
    """A decode worker's board, whose losses a test reads; looked after as the worker does."""

    def __init__(self, redis: Redis, shard: str) -> None:
        self.bus = PrefillBus(redis, shard, Cell("c"))
        self.lost: list[tuple[RequestId, Fallback]] = []
        self.asked_for: set[RequestId] = set()
        self.board = JobBoard(
            self.bus, RequestProjection(redis, shard), WorkerId("d"), Epoch(7), lambda _: None, self._lose
        )

    def _lose(self, request_id: RequestId, reason: Fallback) -> None:
        self.lost.append((request_id, reason))
        self.board.withdraw(request_id)

    def post(self, request_id: RequestId) -> None:
        self.board.post(JobPosted(request_id, 700, 0, 0, 60.0))

    async def look(self) -> None:
        while True:
            self.board.look(self.asked_for)
            await asyncio.sleep(0.02)

    async def loses(self, *lost: tuple[RequestId, Fallback]) -> None:
        async def same() -> bool:
            return self.lost == list(lost)

        await eventually(same)


@pytest.fixture
async def house(redis: Redis, shard: str) -> AsyncIterator[House]:
    house = House(redis, shard)
    looking = asyncio.create_task(house.look())
    yield house
    looking.cancel()
    await house.board.close()
    assert await house.bus.retire(), "a job was left on the bus"


async def test_claims_tell_who_waits_who_is_claimed_and_what_is_gone(redis: Redis, shard: str) -> None:
    house = House(redis, shard)
    assert await house.bus.claims([]) == []
    for request_id in (A, B):
        house.post(request_id)
    claimed = await house.bus.claim("p", WAIT_MS)
    assert claimed is not None
    waiting = await redis.xrange(f"diptych:{{{shard}}}:prefill:c")
    ids = [entry_id.decode() for entry_id, _ in waiting]
    ages_s = dict(zip(ids, await house.bus.claims(ids), strict=True))
    assert ages_s.pop(claimed.entry_id) or 0 > 0.0
    assert list(ages_s.values()) == [0.0]
    for entry_id in ids:
        await house.bus.withdraw(entry_id)
    assert await house.bus.claims(ids) == [None, None]
    await house.board.close()
    assert await house.bus.retire()


async def test_a_claim_whose_worker_is_silent_is_lost_and_one_that_waits_is_not(house: House) -> None:
    house.post(A)
    assert await house.bus.claim("p", WAIT_MS) is not None
    house.post(B)
    await house.loses((A, Fallback.CLAIM_STALLED))
    assert await house.bus.depth() == 1
    house.board.withdraw(B)


async def test_one_that_asks_is_not_silent(house: House) -> None:
    house.asked_for = {A}
    house.post(A)
    house.post(B)
    for _ in range(2):
        assert await house.bus.claim("p", WAIT_MS) is not None
    await house.loses((B, Fallback.CLAIM_STALLED))
    house.asked_for = set()  # it was refused
    await house.loses((B, Fallback.CLAIM_STALLED), (A, Fallback.CLAIM_STALLED))


async def test_one_that_has_begun_is_its_worker_s(house: House) -> None:
    house.post(A)
    house.post(B)
    for _ in range(2):
        claimed = await house.bus.claim("p", WAIT_MS)
        assert claimed is not None
        if claimed.job.request_id == A:
            house.board.begun(A)
            await house.bus.done(claimed.entry_id)
    await house.loses((B, Fallback.CLAIM_STALLED))


async def test_one_that_the_store_has_lost_is_posted_anew(house: House, redis: Redis, shard: str) -> None:
    house.post(A)
    await eventually(lambda: _is_posted(house))
    await redis.delete(f"diptych:{{{shard}}}:prefill:c")
    await house.loses((A, Fallback.JOB_GONE))


async def test_a_store_that_does_not_answer_takes_no_jobs(house: House, store_server: StoreServer) -> None:
    house.post(A)
    await eventually(lambda: _is_posted(house))
    with paused(store_server):
        await house.loses((A, Fallback.STORE_UNAVAILABLE))


async def _is_posted(house: House) -> bool:
    return await house.bus.depth() == 1


def test_a_stalled_claim_is_noticed_before_it_is_swept() -> None:
    from services.prefill.config import PrefillServiceSettings

    assert PrefillServiceSettings.model_fields["sweep_s"].default > CLAIM_S
