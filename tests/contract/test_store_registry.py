"""Who is alive: epochs, TTLs, and a store that forgets."""

import dataclasses
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import Stale
from diptych.domain.ids import Cell, Epoch, WorkerId
from diptych.domain.records import ChannelEndpoint, Role, WorkerLoad, WorkerRecord
from diptych.store.registry import Registry
from tests.support.valkey import eventually

W1 = WorkerId("w1")
LOAD = WorkerLoad(num_running=3, free_blocks=7, total_blocks=8, ttft_s=0.25)


def record(worker_id: str = "w1", epoch: int = 1, role: Role = Role.DECODE) -> WorkerRecord:
    return WorkerRecord(
        worker_id=WorkerId(worker_id),
        role=role,
        epoch=Epoch(epoch),
        cell=Cell("c"),
        model="toy",
        fingerprint="f" * 32,
        rpc_address="127.0.0.1:7",
        channels=(ChannelEndpoint("grpc", "127.0.0.1:8"),),
        capacity_tokens=128,
    )


@pytest.fixture
async def registry(redis: Redis, shard: str) -> AsyncIterator[Registry]:
    """Leaves the shard without workers, whatever a test registered."""
    registry = Registry(redis, shard)
    yield registry
    for worker in await registry.alive():
        await registry.deregister(worker.worker_id, worker.epoch)


async def test_what_was_registered_is_alive(registry: Registry) -> None:
    largest = record("w2", 2**63 - 1, Role.PREFILL)
    await registry.register(record(), ttl_s=30)
    await registry.register(largest, ttl_s=30)

    assert await registry.alive() == [record(), largest]
    assert await registry.alive(Role.PREFILL) == [largest]
    assert await registry.alive(Role.BOTH) == []


async def test_a_heartbeat_carries_the_load(registry: Registry) -> None:
    await registry.register(record(), ttl_s=30)

    assert not await registry.heartbeat(W1, Epoch(1), LOAD)
    assert await registry.alive() == [dataclasses.replace(record(), load=LOAD)]


async def test_a_heartbeat_without_registration_is_refused(registry: Registry) -> None:
    with pytest.raises(Stale, match="no registration"):
        await registry.heartbeat(W1, Epoch(1), LOAD)


async def test_only_its_own_epoch_deregisters(registry: Registry) -> None:
    await registry.register(record(epoch=1), ttl_s=30)

    assert not await registry.deregister(W1, Epoch(2))
    assert await registry.alive() == [record(epoch=1)]
    assert await registry.deregister(W1, Epoch(1))
    assert await registry.alive() == []
    assert not await registry.deregister(W1, Epoch(1))


@pytest.mark.parametrize("newer", [1, 3], ids=["smaller number", "greater number"])
async def test_a_later_epoch_replaces_an_earlier(
    registry: Registry, redis: Redis, shard: str, newer: int
) -> None:
    """Epochs are random: what counts is who came later, not the number."""
    old_process = Registry(redis, shard)
    await old_process.register(record(epoch=2), ttl_s=30)
    await registry.register(record(epoch=newer), ttl_s=30)

    with pytest.raises(Stale, match="replaced"):
        await old_process.heartbeat(W1, Epoch(2), LOAD)
    with pytest.raises(Stale, match="replaced"):
        await old_process.register(record(epoch=2), ttl_s=30)
    assert not await old_process.deregister(W1, Epoch(2))
    assert await registry.alive() == [record(epoch=newer)]


async def test_a_later_epoch_wins_though_the_clock_went_back(
    registry: Registry, redis: Redis, shard: str
) -> None:
    old_process = Registry(redis, shard)
    await old_process.register(record(epoch=2), ttl_s=30)
    far_ahead = 2**52
    await redis.hset(f"diptych:{{{shard}}}:worker:w1", "since", str(far_ahead))

    await registry.register(record(epoch=1), ttl_s=30)

    assert await redis.hget(f"diptych:{{{shard}}}:worker:w1", "since") == str(far_ahead + 1).encode()
    with pytest.raises(Stale):
        await old_process.heartbeat(W1, Epoch(2), LOAD)
    assert not await registry.heartbeat(W1, Epoch(1), LOAD)


async def test_a_registration_ends_with_its_ttl(registry: Registry) -> None:
    await registry.register(record(), ttl_s=0.05)

    async def is_gone() -> bool:
        return await registry.alive() == []

    await eventually(is_gone)
    assert await registry.heartbeat(W1, Epoch(1), LOAD), "it was forgotten and must hear so"


async def test_the_longest_ttl_keeps_the_index(registry: Registry) -> None:
    await registry.register(record("w1"), ttl_s=30)
    await registry.register(record("w2"), ttl_s=0.05)

    async def is_one() -> bool:
        return await registry.alive() == [record("w1")]

    await eventually(is_one)


async def test_heartbeats_bring_everyone_back_after_a_flush(registry: Registry, redis: Redis) -> None:
    await registry.register(record("w1"), ttl_s=30)
    await registry.register(record("w2"), ttl_s=30)
    await redis.flushall()
    assert await registry.alive() == []

    assert await registry.heartbeat(WorkerId("w1"), Epoch(1), LOAD)
    assert await registry.heartbeat(WorkerId("w2"), Epoch(1), LOAD)
    assert not await registry.heartbeat(WorkerId("w2"), Epoch(1), LOAD)
    assert [worker.worker_id for worker in await registry.alive()] == ["w1", "w2"]


async def test_the_order_of_epochs_outlives_a_flush(registry: Registry, redis: Redis, shard: str) -> None:
    """The old process continues after being stopped and is the first to speak to the empty store."""
    old_process = Registry(redis, shard)
    await old_process.register(record(epoch=2), ttl_s=30)
    await registry.register(record(epoch=1), ttl_s=30)
    await redis.flushall()

    await old_process.heartbeat(W1, Epoch(2), LOAD)
    assert await registry.heartbeat(W1, Epoch(1), LOAD) is False
    with pytest.raises(Stale):
        await old_process.heartbeat(W1, Epoch(2), LOAD)
    assert [worker.epoch for worker in await registry.alive()] == [1]


@pytest.mark.parametrize("garbage", [b"", b"\xff\x00", b"[]", b'{"worker_id": 5}'])
async def test_an_unreadable_record_is_passed_over(
    registry: Registry, redis: Redis, shard: str, garbage: bytes
) -> None:
    await registry.register(record("w1"), ttl_s=30)
    await registry.register(record("w2"), ttl_s=30)
    await redis.hset(f"diptych:{{{shard}}}:worker:w2", "record", garbage)

    assert await registry.alive() == [record("w1")]
    assert registry.num_malformed == 1
    await registry.heartbeat(WorkerId("w2"), Epoch(1), WorkerLoad())
    assert await registry.alive() == [record("w1"), record("w2")]


@pytest.mark.parametrize("key", ["worker:w1", "workers"])
async def test_a_key_of_another_type_is_replaced(
    registry: Registry, redis: Redis, shard: str, key: str
) -> None:
    await registry.register(record(), ttl_s=30)
    await redis.set(f"diptych:{{{shard}}}:{key}", "garbage")

    await registry.heartbeat(W1, Epoch(1), WorkerLoad())
    assert await registry.alive() == [record()]
