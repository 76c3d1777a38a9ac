"""A store that is flushed, restarted, stopped, full, or left in the middle of an answer.

Whatever happens to it: calls end within their timeout, with `StoreUnavailable` or an answer that is theirs,
and work again when it does.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import StoreUnavailable
from diptych.domain.ids import Attempt, Cell, ChunkHash, Epoch, RequestId, Tenant, WorkerId
from diptych.domain.records import PrefillJob, RequestRecord, Role, Tier, WorkerLoad, WorkerRecord
from diptych.store.bus import PrefillBus
from diptych.store.directory import ChunkDirectory
from diptych.store.registry import Registry
from diptych.store.requests import RequestProjection
from tests.support.valkey import DEADLINE_S, StoreServer, claim_waits, eventually, keys_of, paused

W1, EPOCH, CELL = WorkerId("w1"), Epoch(11), Cell("c0")
SHORT_S = 0.3
CHUNK = ChunkHash(b"c" * 16)
WORKER = WorkerRecord(W1, Role.DECODE, EPOCH, CELL, "toy", "f", "127.0.0.1:1")


def job(name: str) -> PrefillJob:
    return PrefillJob(RequestId(name), W1, EPOCH, num_prompt_tokens=300)


class House:
    """Every room of the store on one client, with a short timeout."""

    def __init__(self, redis: Redis, shard: str) -> None:
        self.redis, self.shard = redis, shard
        self.registry = Registry(redis, shard, timeout_s=SHORT_S)
        self.bus = PrefillBus(redis, shard, CELL, timeout_s=SHORT_S)
        self.requests = RequestProjection(redis, shard, timeout_s=SHORT_S)
        self.directory = ChunkDirectory(redis, shard, timeout_s=SHORT_S)

    async def use_everything(self) -> None:
        """One request's worth of calls, which leaves nothing; raises when an answer is wrong."""
        await self.registry.register(WORKER, ttl_s=30)
        assert await self.registry.alive() == [WORKER]
        entry_id = await self.bus.post(job("r"))
        claimed = await self.bus.claim("p", 1000)
        assert claimed is not None
        assert claimed.job == job("r")
        assert claimed.entry_id == entry_id
        assert await self.bus.done(entry_id)
        record = RequestRecord(RequestId("r"), Tenant("t"), "RUNNING", W1, EPOCH, Attempt(1))
        await self.requests.put(record)
        assert await self.requests.get(RequestId("r")) == record
        await self.directory.publish(W1, EPOCH, {CHUNK: Tier.L1})
        assert CHUNK in await self.directory.locate([CHUNK], {(W1, EPOCH)})
        await self.empty()

    async def empty(self) -> None:
        for key in await keys_of(self.redis, self.shard):
            await self.redis.delete(key)

    async def works(self) -> bool:
        try:
            await self.use_everything()
        except StoreUnavailable:
            return False
        return True


@pytest.fixture
async def house(redis: Redis, shard: str) -> AsyncIterator[House]:
    house = House(redis, shard)
    yield house
    await house.empty()


async def test_everything_works_without_preparation(house: House) -> None:
    await house.use_everything()


async def test_functions_may_vanish_at_any_moment(house: House) -> None:
    for _ in range(3):
        await house.use_everything()
        await house.redis.flushall()
        await house.redis.function_flush()


async def test_a_flush_between_any_two_calls_breaks_nothing(house: House) -> None:
    """Answers change, because state is gone; no call fails."""

    async def flushed() -> None:
        await house.redis.flushall()

    await house.registry.register(WORKER, ttl_s=30)
    await flushed()
    assert await house.registry.heartbeat(W1, EPOCH, WorkerLoad())
    entry_id = await house.bus.post(job("lost"))
    await flushed()
    assert await house.bus.claim("p", 0) is None
    assert not await house.bus.done(entry_id)
    entry_id = await house.bus.post(job("claimed"))
    assert await house.bus.claim("p", 0) is not None
    await flushed()
    assert await house.bus.sweep(0) == 0
    assert not await house.bus.done(entry_id)
    assert await house.bus.depth() == 0
    await house.directory.publish(W1, EPOCH, {CHUNK: Tier.L1})
    await flushed()
    assert await house.directory.withdraw(W1, EPOCH, [CHUNK]) == 0
    assert await house.directory.sweep_worker(W1, EPOCH) == 0
    assert not await house.registry.deregister(W1, EPOCH)


async def test_a_restart_costs_no_more_than_state(house: House, store_server: StoreServer) -> None:
    await house.use_everything()
    await asyncio.to_thread(store_server.restart)

    await house.use_everything()


async def test_a_claim_outlasts_a_restart(house: House, store_server: StoreServer) -> None:
    claim = asyncio.create_task(house.bus.claim("p", round(DEADLINE_S * 1000)))
    await claim_waits(house.redis)
    await asyncio.to_thread(store_server.restart)

    with pytest.raises(StoreUnavailable):
        await claim
    await eventually(house.works)


async def test_a_stopped_store_is_unavailable_in_time(house: House, store_server: StoreServer) -> None:
    calls = {
        "register": house.registry.register(WORKER, 30),
        "alive": house.registry.alive(),
        "post": house.bus.post(job("r")),
        "claim": house.bus.claim("p", 50),
        "done": house.bus.done("1-1"),
        "depth": house.bus.depth(),
        "get": house.requests.get(RequestId("r")),
        "locate": house.directory.locate([CHUNK], set()),
        "sweep": house.directory.sweep_worker(W1, EPOCH),
    }
    begun = time.monotonic()
    with paused(store_server):
        outcomes = dict(
            zip(calls, await asyncio.gather(*calls.values(), return_exceptions=True), strict=True)
        )

    assert {name for name, outcome in outcomes.items() if not isinstance(outcome, StoreUnavailable)} == set()
    assert time.monotonic() - begun < 10 * SHORT_S
    await eventually(house.works)


async def test_jobs_survive_claims_that_were_abandoned(house: House, store_server: StoreServer) -> None:
    """A stopped server, on waking, gives jobs to claims whose callers have gone."""
    assert await house.bus.claim("p", 0) is None
    names = [f"r{i}" for i in range(4)]
    for name in names:
        await house.bus.post(job(name))
    with paused(store_server):
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await house.bus.claim("p", 10)

    seen: set[str] = set()

    async def all_seen() -> bool:
        claimed = await house.bus.claim("p", 10)
        if claimed is not None:
            assert await house.bus.done(claimed.entry_id)
            seen.add(claimed.job.request_id)
        await house.bus.sweep(min_idle_ms=200)
        return seen == set(names)

    await eventually(all_seen)
    assert await house.bus.retire()


async def test_a_lost_done_is_made_up_for(house: House, store_server: StoreServer) -> None:
    await house.bus.post(job("r"))
    claimed = await house.bus.claim("p", 0)
    assert claimed is not None
    with paused(store_server):
        with pytest.raises(StoreUnavailable):
            await house.bus.done(claimed.entry_id)

    assert await house.bus.claim("p", 0) is None
    assert await house.bus.retire()


async def test_a_full_store_refuses_new_state_and_keeps_the_old_going(house: House) -> None:
    await house.registry.register(WORKER, ttl_s=30)
    await house.bus.post(job("r"))
    await house.directory.publish(W1, EPOCH, {CHUNK: Tier.L1})
    record = RequestRecord(RequestId("r"), Tenant("t"), "RUNNING", W1, EPOCH, Attempt(1))
    await house.requests.put(record)
    before = str((await house.redis.config_get("maxmemory"))["maxmemory"])
    await house.redis.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailable, match="(?i)maxmemory|memory"):
            await house.bus.post(job("r2"))
        with pytest.raises(StoreUnavailable):
            await house.directory.publish(W1, EPOCH, {ChunkHash(b"d" * 16): Tier.L1})
        with pytest.raises(StoreUnavailable):
            await house.requests.put(
                RequestRecord(RequestId("r2"), Tenant("t"), "RUNNING", W1, EPOCH, Attempt(1))
            )

        assert not await house.registry.heartbeat(W1, EPOCH, WorkerLoad(num_running=1))
        assert len(await house.registry.alive()) == 1
        claimed = await house.bus.claim("p", 0)
        assert claimed is not None
        assert await house.bus.done(claimed.entry_id)
        assert await house.requests.get(RequestId("r")) == record
        assert CHUNK in await house.directory.locate([CHUNK], {(W1, EPOCH)})
        assert await house.directory.withdraw(W1, EPOCH, [CHUNK]) == 1
        assert await house.registry.deregister(W1, EPOCH)
    finally:
        await house.redis.config_set("maxmemory", before)


async def test_connections_to_a_demoted_server_are_left(house: House) -> None:
    """Behind the same address another server may answer by now."""
    await house.use_everything()
    before = {client["id"] for client in await house.redis.client_list()}
    await house.redis.replicaof("127.0.0.1", "1")
    try:
        for call in (house.bus.post(job("r")), house.bus.claim("p", 10), house.registry.register(WORKER, 30)):
            with pytest.raises(StoreUnavailable):
                await call
            after = {client["id"] for client in await house.redis.client_list()}
            assert not before & after
            before = after
    finally:
        await house.redis.replicaof("NO", "ONE")
    await house.use_everything()


async def test_a_cancelled_call_leaves_no_answer_behind(house: House) -> None:
    """Cancels at every moment of a call: whoever gets the connection next must read his own answer."""
    await house.registry.register(WORKER, ttl_s=30)
    calls: list[Callable[[], Coroutine[object, object, object]]] = [
        house.registry.alive,
        house.bus.depth,
        lambda: house.bus.claim("p", 5),
    ]
    chance = random.Random(7)
    num_cancelled = 0
    for i in range(400):
        call = chance.choice(calls)
        cancelled = asyncio.create_task(call())
        for _ in range(chance.randrange(14)):
            await asyncio.sleep(0)
        cancelled.cancel()
        key = f"diptych:{{{house.shard}}}:probe"
        _, echo, alive = await asyncio.gather(
            asyncio.gather(cancelled, return_exceptions=True),
            house.redis.set(key, i, get=True),
            house.registry.alive(),
        )
        num_cancelled += cancelled.cancelled()
        assert echo == (str(i - 1).encode() if i else None)
        assert alive == [WORKER]
    assert num_cancelled > 100

    pool = house.redis.connection_pool
    assert list(pool._get_in_use_connections()) == []


async def test_a_cancelled_claim_ends_at_once_and_frees_the_server(house: House) -> None:
    await house.bus.claim("p", 0)

    async def num_blocked() -> int:
        return int((await house.redis.info("clients"))["blocked_clients"])

    async def one_is_blocked() -> bool:
        return await num_blocked() == 1

    async def none_is_blocked() -> bool:
        return await num_blocked() == 0

    claim = asyncio.create_task(house.bus.claim("p", 60_000))
    await eventually(one_is_blocked)
    claim.cancel()
    await asyncio.wait({claim}, timeout=DEADLINE_S)
    assert claim.cancelled()
    await eventually(none_is_blocked)


async def test_no_cancellation_is_swallowed(house: House) -> None:
    """With redis-py's own socket timeout a third of these would go on to block (Python 3.11)."""
    await house.bus.claim("p", 0)
    for i in range(200):
        claim = asyncio.create_task(house.bus.claim("p", 60_000))
        for _ in range(i % 40):
            await asyncio.sleep(0)
        claim.cancel()
        await asyncio.wait({claim}, timeout=DEADLINE_S)
        assert claim.cancelled()


async def test_more_calls_than_connections_wait_for_their_turn(house: House) -> None:
    await house.registry.register(WORKER, ttl_s=30)
    registry = Registry(house.redis, house.shard)

    answers = await asyncio.gather(*(registry.alive() for _ in range(300)))

    assert answers == [[WORKER]] * 300
    clients = [client for client in await house.redis.client_list() if client["name"] == "diptych"]
    assert len(clients) <= 32


class Traffic:
    """A poster and two workers that go on whatever happens. `num_done` counts jobs that came all the way."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._is_over = False
        self.num_done = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._post())
            for name in ("p0", "p1"):
                tasks.create_task(self._work(name))

    def end(self) -> None:
        self._is_over = True

    async def _post(self) -> None:
        for i in itertools.count():
            if self._is_over:
                return
            with contextlib.suppress(StoreUnavailable):
                await self._house.registry.register(WORKER, ttl_s=30)
                if await self._house.bus.depth() < 10:
                    await self._house.bus.post(job(f"r{i}"))

    async def _work(self, name: str) -> None:
        while not self._is_over:
            with contextlib.suppress(StoreUnavailable):
                claimed = await self._house.bus.claim(name, 50)
                if claimed is not None:
                    await self._house.bus.done(claimed.entry_id)
                    self.num_done += 1


async def test_seeded_chaos(house: House, store_server: StoreServer) -> None:
    """Work goes on while the store is flushed, stopped and restarted; after it all is well."""
    chance = random.Random(11)

    async def stop() -> None:
        with paused(store_server):
            await asyncio.sleep(chance.choice([0.05, 1.5 * SHORT_S]))  # shorter and longer than a timeout

    faults: list[Callable[[], Awaitable[object]]] = [
        house.redis.flushall,
        house.redis.function_flush,
        stop,
        lambda: asyncio.to_thread(store_server.restart),
    ]
    traffic = Traffic(house)
    running = asyncio.create_task(traffic.run())
    for _ in range(12):
        await chance.choice(faults)()
        enough = traffic.num_done + 4

        async def goes_on(enough: int = enough) -> bool:
            return traffic.num_done >= enough or running.done()

        await eventually(goes_on)
    traffic.end()
    await running
    await eventually(house.works)
