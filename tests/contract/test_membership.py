"""Membership on a real store: it comes, it goes, and no fate of the store ends it or what it knew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import StoreUnavailable
from diptych.domain.ids import Cell, Epoch, WorkerId
from diptych.domain.records import Role, WorkerLoad, WorkerRecord
from diptych.store.connect import client, connect
from diptych.store.embedded import EmbeddedServer
from diptych.store.membership import Membership, new_epoch
from diptych.store.registry import Registry
from tests.support.valkey import EmbeddedStore, eventually

HEARTBEAT_S = 0.02
TTL_S = 0.4
SHARD = "test"

Join = Callable[..., Membership]


def record(worker_id: str, role: Role = Role.CACHE, epoch: int = 1) -> WorkerRecord:
    return WorkerRecord(WorkerId(worker_id), role, Epoch(epoch), Cell("main"), "toy", "f" * 32, "127.0.0.1:1")


@pytest.fixture
async def redis(valkey: EmbeddedServer) -> AsyncIterator[Redis]:
    redis = await connect(valkey.url)
    yield redis
    await redis.aclose()


@pytest.fixture
async def join(redis: Redis) -> AsyncIterator[Join]:
    """`join(record)`: a membership of its own registry, not started; stopped when the test ends."""
    async with AsyncExitStack() as stack:

        def make(mine: WorkerRecord, **rest: object) -> Membership:
            registry = Registry(redis, SHARD, timeout_s=0.2)
            membership = Membership(registry, lambda: mine, HEARTBEAT_S, TTL_S, **rest)  # type: ignore[arg-type]
            stack.push_async_callback(membership.stop, 0.5)
            return membership

        yield make


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds)


def names(membership: Membership, *roles: Role) -> set[str]:
    return {peer.worker_id for peer in membership.peers(*roles)}


def test_epochs_are_63_random_bits() -> None:
    epochs = {new_epoch() for _ in range(1000)}
    assert len(epochs) == 1000
    assert all(0 < epoch < 1 << 63 for epoch in epochs)
    assert max(epochs) > 1 << 60


async def test_those_who_joined_know_each_other(join: Join) -> None:
    cache, decode = join(record("cache")), join(record("decode", Role.DECODE, epoch=7))
    await cache.start()
    await decode.start()
    assert names(decode) == {"cache", "decode"}
    await until(lambda: names(cache) == {"cache", "decode"})
    assert names(cache, Role.DECODE, Role.BOTH) == {"decode"}
    assert cache.peer(WorkerId("decode"), Epoch(7)) == record("decode", Role.DECODE, epoch=7)
    assert cache.peer(WorkerId("decode"), Epoch(8)) is None
    assert cache.peer(WorkerId("nobody")) is None
    assert cache.available


async def test_leaving_is_seen_at_once(join: Join, redis: Redis) -> None:
    cache, decode = join(record("cache")), join(record("decode", Role.DECODE))
    await cache.start()
    await decode.start()
    await decode.stop()
    assert [worker.worker_id for worker in await Registry(redis, SHARD).alive()] == ["cache"]
    await until(lambda: names(cache) == {"cache"})
    assert not decode.available
    await decode.stop()  # a second time is fine


async def test_heartbeats_outlast_the_ttl_and_carry_the_load(redis: Redis) -> None:
    load = WorkerLoad(num_running=1)
    registry = Registry(redis, SHARD)
    cache = Membership(registry, lambda: replace(record("cache"), load=load), HEARTBEAT_S, TTL_S)
    await cache.start()
    load = WorkerLoad(num_running=2)

    async def seen() -> bool:
        return [worker.load for worker in await registry.alive()] == [WorkerLoad(num_running=2)]

    await eventually(seen)
    await cache.stop()


async def test_a_killed_process_is_forgotten_after_its_ttl(join: Join, redis: Redis) -> None:
    await Registry(redis, SHARD).register(record("dead"), TTL_S)
    cache = join(record("cache"))
    await cache.start()
    assert names(cache) == {"cache", "dead"}
    await until(lambda: names(cache) == {"cache"})


async def test_a_flush_loses_nobody(join: Join, redis: Redis) -> None:
    forgotten: list[str] = []
    members = [join(record(name), on_forgotten=lambda name=name: forgotten.append(name)) for name in "abc"]
    for member in members:
        await member.start()
    await until(lambda: all(names(member) == set("abc") for member in members))
    for _ in range(5):
        forgotten.clear()
        await redis.flushall()
        while sorted(forgotten) != list("abc"):
            assert all(names(member) == set("abc") for member in members)
            await asyncio.sleep(0)
    assert all(member.available for member in members)
    assert {worker.worker_id for worker in await Registry(redis, SHARD).alive()} == set("abc")


async def test_a_flush_between_heartbeat_and_look_loses_nobody(redis: Redis) -> None:
    class FlushedBefore(Registry):
        num_flushes = 0

        async def alive(self, role: Role | None = None) -> list[WorkerRecord]:
            if cache.peers():  # not at the start
                await redis.flushall()
                self.num_flushes += 1
            return await super().alive(role)

    registry = FlushedBefore(redis, SHARD)
    cache = Membership(registry, lambda: record("cache"), HEARTBEAT_S, 60.0)
    await Registry(redis, SHARD).register(record("decode", Role.DECODE), TTL_S)
    await cache.start()
    await until(lambda: registry.num_flushes == 3)
    assert names(cache) == {"cache", "decode"}
    await cache.stop()


async def test_who_died_with_the_flush_is_dropped_in_the_end(join: Join, redis: Redis) -> None:
    await Registry(redis, SHARD).register(record("dead"), 60.0)
    cache = join(record("cache"))
    await cache.start()
    await redis.flushall()
    assert names(cache) == {"cache", "dead"}
    await until(lambda: names(cache) == {"cache"})


async def test_a_restarted_store_hears_everyone_again(
    join: Join, valkey: EmbeddedServer, redis: Redis
) -> None:
    cache, decode = join(record("cache")), join(record("decode", Role.DECODE))
    await cache.start()
    await decode.start()
    await until(lambda: names(cache) == {"cache", "decode"})
    await asyncio.to_thread(valkey.stop)
    await until(lambda: not cache.available)
    assert names(cache) == {"cache", "decode"}
    await asyncio.to_thread(valkey.start)
    await until(lambda: cache.available and decode.available)
    assert names(cache) == {"cache", "decode"}
    registry = Registry(redis, SHARD)
    await eventually(lambda: _all_back(registry))


async def _all_back(registry: Registry) -> bool:
    try:
        return len(await registry.alive()) == 2
    except StoreUnavailable:
        return False


@pytest.mark.parametrize("ttls", [1, 3])
async def test_a_store_that_stands_still_costs_time_only(
    join: Join, valkey: EmbeddedServer, ttls: int
) -> None:
    cache = join(record("cache"))
    await cache.start()
    store = EmbeddedStore(valkey)
    store.pause()
    try:
        await until(lambda: not cache.available)
        await asyncio.sleep(ttls * TTL_S)  # the fault itself: how long the store stands still
        assert names(cache) == {"cache"}
    finally:
        store.resume()
    await until(lambda: cache.available)
    assert names(cache) == {"cache"}


async def test_stopping_is_bounded_when_the_store_stands_still(redis: Redis, valkey: EmbeddedServer) -> None:
    registry = Registry(redis, SHARD, timeout_s=60)
    cache = Membership(registry, lambda: record("cache"), HEARTBEAT_S, TTL_S)
    await cache.start()
    store = EmbeddedStore(valkey)
    store.pause()
    try:
        async with asyncio.timeout(10):
            await cache.stop(timeout_s=0.1)
    finally:
        store.resume()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "membership"]
    assert await redis.ping()


async def test_without_a_store_it_does_not_start() -> None:
    redis = client("redis://127.0.0.1:1/0")
    cache = Membership(Registry(redis, SHARD), lambda: record("cache"), HEARTBEAT_S, TTL_S)
    with pytest.raises(StoreUnavailable):
        await cache.start()
    assert not cache.available
    await cache.stop()
    await redis.aclose()


async def test_a_later_start_takes_the_name(join: Join, redis: Redis) -> None:
    old, new = join(record("cache", epoch=1)), join(record("cache", epoch=2))
    await old.start()
    await new.start()
    async with asyncio.timeout(10):
        await old.replaced.wait()
    await old.stop()
    assert [worker.epoch for worker in await Registry(redis, SHARD).alive()] == [Epoch(2)]
    assert not new.replaced.is_set()


async def test_an_error_of_ours_does_not_end_the_beat(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    is_broken = False

    def mine() -> WorkerRecord:
        if is_broken:
            raise RuntimeError("no load today")
        return record("cache")

    cache = Membership(Registry(redis, SHARD), mine, HEARTBEAT_S, TTL_S)
    await cache.start()
    is_broken = True
    await until(lambda: not cache.available)
    is_broken = False
    await until(lambda: cache.available)
    assert "no load today" in caplog.text
    await cache.stop()
