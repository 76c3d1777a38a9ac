"""The prefill queue: each job to one worker, whatever happens in between."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import Overloaded, StoreUnavailable
from diptych.domain.ids import Cell, Epoch, RequestId, WorkerId
from diptych.domain.records import PrefillJob
from diptych.store.bus import PrefillBus
from tests.support.valkey import DEADLINE_S, claim_waits, eventually

WAIT_MS = round(DEADLINE_S * 1000)
CELL = Cell("c0")


def job(name: str = "r0", deadline_unix_s: float = 0.0) -> PrefillJob:
    return PrefillJob(
        request_id=RequestId(name),
        decode_worker=WorkerId("d0"),
        decode_epoch=Epoch(2**63 - 1),
        num_prompt_tokens=1000,
        num_cached_tokens=256,
        deadline_unix_s=deadline_unix_s,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


@pytest.fixture
def stream(shard: str) -> str:
    return f"diptych:{{{shard}}}:prefill:c0"


@pytest.fixture
async def bus(redis: Redis, shard: str) -> AsyncIterator[PrefillBus]:
    """The test must take every job off."""
    bus = PrefillBus(redis, shard, CELL)
    yield bus
    assert await bus.retire(), "a job was left on the bus"


async def finish_next(bus: PrefillBus, consumer: str = "p0") -> str:
    claimed = await bus.claim(consumer, WAIT_MS)
    assert claimed is not None
    assert await bus.done(claimed.entry_id)
    return claimed.job.request_id


async def test_a_job_arrives_as_it_was_posted(bus: PrefillBus) -> None:
    wanted = job(deadline_unix_s=time.time() + 1000)
    entry_id = await bus.post(wanted)
    assert await bus.depth() == 1

    claimed = await bus.claim("p0", 0)

    assert claimed is not None
    assert (claimed.job, claimed.entry_id, claimed.deliveries) == (wanted, entry_id, 1)
    assert await bus.depth() == 0
    assert not await bus.retire(), "a claimed job is still a job"
    assert await bus.done(entry_id)
    assert not await bus.done(entry_id)


async def test_jobs_keep_their_order(bus: PrefillBus) -> None:
    names = [f"r{i}" for i in range(5)]
    for name in names:
        await bus.post(job(name))

    assert [await finish_next(bus) for _ in names] == names


async def test_an_empty_bus_gives_nothing(bus: PrefillBus) -> None:
    assert await bus.claim("p0", 0) is None
    assert await bus.claim("p0", 20) is None
    assert await bus.depth() == 0


async def test_a_claim_waits_for_the_next_job(bus: PrefillBus, redis: Redis) -> None:
    claim = asyncio.create_task(finish_next(bus))
    await claim_waits(redis)
    await bus.post(job("late"))

    assert await claim == "late"


async def test_each_job_goes_to_one_of_many_workers(bus: PrefillBus) -> None:
    names = {f"r{i}" for i in range(40)}

    async def work(consumer: str) -> list[str]:
        done: list[str] = []
        while (claimed := await bus.claim(consumer, 50)) is not None:
            assert await bus.done(claimed.entry_id)
            done.append(claimed.job.request_id)
        return done

    for name in names:
        await bus.post(job(name))
    shares = await asyncio.gather(*(work(f"p{i}") for i in range(4)))

    assert sorted(name for share in shares for name in share) == sorted(names)


async def test_cells_do_not_share_jobs(bus: PrefillBus, redis: Redis, shard: str) -> None:
    other = PrefillBus(redis, shard, Cell("c1"))
    await bus.post(job())

    assert await other.claim("p0", 0) is None
    assert await finish_next(bus) == "r0"
    assert await other.retire()


async def test_a_withdrawn_job_is_gone(bus: PrefillBus) -> None:
    waiting, claimed = await bus.post(job("r0")), await bus.post(job("r1"))
    assert await bus.withdraw(waiting)
    assert (await bus.claim("p0", 0)) is not None

    assert await bus.withdraw(claimed), "even from under the hands of the claimer"
    assert not await bus.done(claimed)
    assert await bus.claim("p0", 0) is None


async def test_a_full_bus_refuses(redis: Redis, shard: str, bus: PrefillBus) -> None:
    small = PrefillBus(redis, shard, CELL, max_depth=2)
    await small.post(job("r0"))
    await small.post(job("r1"))

    with pytest.raises(Overloaded):
        await small.post(job("r2"))
    assert [await finish_next(bus) for _ in range(2)] == ["r0", "r1"]


async def test_a_job_past_its_deadline_is_dropped(bus: PrefillBus) -> None:
    await bus.post(job("late", time.time() - 1))
    await bus.post(job("r1", time.time() + 1000))

    assert await finish_next(bus) == "r1"
    assert bus.dropped == {"expired": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"x": "y"},
        {"job": b"\xff\xfe", "deadline": "0", "deliveries": "1"},
        {"job": "{}", "deadline": "0", "deliveries": "1"},
        {"job": "[1]", "deadline": "0", "deliveries": "1"},
        {
            "job": '{"request_id":"r","decode_worker":"d","decode_epoch":1,"num_prompt_tokens":1}',
            "deliveries": "many",
        },
        {"job": "9" * 100_000, "deadline": "soon", "deliveries": ""},
    ],
)
@pytest.mark.parametrize("claimer_died", [False, True])
async def test_garbage_is_dropped_and_counted(
    bus: PrefillBus, redis: Redis, stream: str, fields: dict[str, str], claimer_died: bool
) -> None:
    await redis.xadd(stream, fields)  # type: ignore[arg-type]
    await bus.post(job())
    if claimer_died:
        await redis.xgroup_create(stream, "prefill", 0)
        await redis.xreadgroup("prefill", "dead", {stream: ">"}, count=1)
        await bus.sweep(0)

    assert await finish_next(bus) == "r0"
    assert await bus.claim("p0", 0) is None
    assert bus.dropped == {"malformed": 1}


async def test_a_key_of_another_type_is_replaced(bus: PrefillBus, redis: Redis, stream: str) -> None:
    await redis.set(stream, "garbage")
    assert await bus.depth() == 0
    assert await bus.claim("p0", 0) is None
    await redis.delete(stream)
    await redis.set(stream, "garbage")
    await bus.post(job())
    assert await finish_next(bus) == "r0"


async def test_a_dead_claimers_job_goes_to_another(bus: PrefillBus) -> None:
    await bus.post(job())
    assert (await bus.claim("dead", 0)) is not None
    assert await bus.sweep(min_idle_ms=60_000) == 0, "it may be alive"

    assert await bus.sweep(min_idle_ms=0) == 1
    again = await bus.claim("p0", 0)
    assert again is not None
    assert (again.job, again.deliveries) == (job(), 2)
    assert await bus.done(again.entry_id)


async def test_a_job_that_kills_its_claimers_is_dropped(redis: Redis, shard: str, bus: PrefillBus) -> None:
    await bus.post(job("poison"))
    for expected in (1, 2, 3):
        claimed = await bus.claim("dead", 0)
        assert claimed is not None
        assert claimed.deliveries == expected
        await bus.sweep(0)

    assert await bus.claim("p0", 0) is None
    assert bus.dropped == {"exhausted": 1}


async def test_an_expired_job_is_dropped_by_the_sweep(bus: PrefillBus) -> None:
    soon = time.time() + 0.2
    await bus.post(job("late", soon))
    assert (await bus.claim("dead", 0)) is not None

    async def is_dropped() -> bool:
        return time.time() > soon + 0.05 and await bus.sweep(0) == 0 and bus.dropped["expired"] == 1

    await eventually(is_dropped)


async def test_a_sweep_works_off_any_number(bus: PrefillBus) -> None:
    for i in range(250):
        await bus.post(job(f"r{i}"))
        await bus.claim("dead", 0)

    assert await bus.sweep(0) == 250
    assert [await finish_next(bus) for _ in range(250)] == [f"r{i}" for i in range(250)]


async def test_a_restarted_worker_gets_back_what_it_held(bus: PrefillBus, redis: Redis, shard: str) -> None:
    await bus.post(job())
    assert (await bus.claim("p0", 0)) is not None

    restarted = PrefillBus(redis, shard, CELL)
    again = await restarted.claim("p0", 0)
    assert again is not None
    assert (again.job, again.deliveries) == (job(), 2)
    assert await restarted.done(again.entry_id)


async def test_a_worker_may_hold_several_jobs(bus: PrefillBus, redis: Redis, stream: str) -> None:
    """A lost claim gives back what was never handed out, and nothing else."""
    await bus.post(job("r0"))
    held = await bus.claim("p0", 0)
    assert held is not None
    lost = asyncio.create_task(bus.claim("p0", WAIT_MS))
    await claim_waits(redis)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await bus.post(job("r1"))
    # As if the server had given it to the claim that was cancelled:
    await redis.xreadgroup("prefill", "p0", {stream: ">"})

    again = await bus.claim("p0", 0)
    assert again is not None
    assert (again.job, again.deliveries) == (job("r1"), 2)
    assert await bus.claim("p0", 0) is None
    assert await bus.done(again.entry_id)
    assert await bus.done(held.entry_id)


async def test_a_done_that_was_lost_is_sent_again(bus: PrefillBus, monkeypatch: pytest.MonkeyPatch) -> None:
    await bus.post(job())
    claimed = await bus.claim("p0", 0)
    assert claimed is not None
    with monkeypatch.context() as away:

        async def lost(*_: object, **__: object) -> None:
            raise StoreUnavailable("away")

        away.setattr(bus._shard, "call", lost)
        with pytest.raises(StoreUnavailable):
            await bus.done(claimed.entry_id)

    assert await bus.claim("p0", 0) is None
    assert await bus.sweep(0) == 0


async def test_a_flush_wakes_no_error_in_a_waiting_claim(bus: PrefillBus, redis: Redis) -> None:
    claim = asyncio.create_task(finish_next(bus))
    await claim_waits(redis)
    await redis.flushall()
    await bus.post(job("after"))

    assert await claim == "after"
