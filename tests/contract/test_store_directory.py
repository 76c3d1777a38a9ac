"""Who holds which chunk, and how changes get there."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import StoreUnavailable
from diptych.domain.ids import ChunkHash, Epoch, WorkerId
from diptych.domain.records import ChunkLocation, Tier
from diptych.store.directory import PIECE, ChunkDirectory
from diptych.store.publisher import Publisher
from tests.support.valkey import eventually, keys_of

W1, W2, CACHE = WorkerId("w1"), WorkerId("w2"), WorkerId("cache@home")
E1, E2 = Epoch(1), Epoch(2**63 - 1)
ALIVE = {(W1, E1), (W2, E2), (CACHE, E1)}


def chunk(i: int) -> ChunkHash:
    return ChunkHash(hashlib.blake2b(i.to_bytes(4), digest_size=16).digest())


@pytest.fixture
async def directory(redis: Redis, shard: str) -> AsyncIterator[ChunkDirectory]:
    directory = ChunkDirectory(redis, shard)
    yield directory
    for worker_id, epoch in [*ALIVE, (W1, E2)]:
        await directory.sweep_worker(worker_id, epoch)


async def test_locations_come_nearest_first(directory: ChunkDirectory) -> None:
    await directory.publish(CACHE, E1, {chunk(0): Tier.L3, chunk(1): Tier.L2})
    await directory.publish(W2, E2, {chunk(0): Tier.L2})
    await directory.publish(W1, E1, {chunk(0): Tier.L1})

    assert await directory.locate([chunk(0), chunk(1), chunk(2)], ALIVE) == {
        chunk(0): (
            ChunkLocation(W1, E1, Tier.L1),
            ChunkLocation(W2, E2, Tier.L2),
            ChunkLocation(CACHE, E1, Tier.L3),
        ),
        chunk(1): (ChunkLocation(CACHE, E1, Tier.L2),),
    }
    assert await directory.locate([], ALIVE) == {}


async def test_the_dead_are_passed_over(directory: ChunkDirectory) -> None:
    await directory.publish(W1, E2, {chunk(0): Tier.L1})
    await directory.publish(W2, E2, {chunk(0): Tier.L1})

    assert await directory.locate([chunk(0)], ALIVE) == {chunk(0): (ChunkLocation(W2, E2, Tier.L1),)}
    assert await directory.locate([chunk(0)], set()) == {}


async def test_a_chunk_moves_between_tiers_and_goes(directory: ChunkDirectory) -> None:
    await directory.publish(CACHE, E1, {chunk(0): Tier.L2})
    await directory.publish(CACHE, E1, {chunk(0): Tier.L3})
    assert await directory.locate([chunk(0)], ALIVE) == {chunk(0): (ChunkLocation(CACHE, E1, Tier.L3),)}

    assert await directory.withdraw(CACHE, E1, [chunk(0), chunk(1)]) == 1
    assert await directory.locate([chunk(0)], ALIVE) == {}


async def test_another_epochs_withdrawal_changes_nothing(directory: ChunkDirectory) -> None:
    await directory.publish(W1, E2, {chunk(0): Tier.L1})

    assert await directory.withdraw(W1, E1, [chunk(0)]) == 0
    assert await directory.sweep_worker(W1, E1) == 0
    assert await directory.locate([chunk(0)], {(W1, E2)}) == {chunk(0): (ChunkLocation(W1, E2, Tier.L1),)}


async def test_the_next_start_of_a_worker_removes_what_the_last_one_left(
    directory: ChunkDirectory, redis: Redis, shard: str
) -> None:
    assert await directory.succeed(W1, E1) == 0
    await directory.publish(W1, E1, {chunk(0): Tier.L2, chunk(1): Tier.L2})
    await directory.publish(W2, E2, {chunk(0): Tier.L2})
    assert await directory.succeed(W1, E1) == 0, "our own stay"
    assert await directory.succeed(W1, E2) == 2
    assert await directory.succeed(W1, E2) == 0
    assert await directory.locate([chunk(0), chunk(1)], {(W1, E1), (W1, E2), (W2, E2)}) == {
        chunk(0): (ChunkLocation(W2, E2, Tier.L2),)
    }
    await directory.sweep_worker(W2, E2)
    assert await keys_of(redis, shard) == [f"diptych:{{{shard}}}:holds:w1"]
    await directory.sweep_worker(W1, E2)
    assert await keys_of(redis, shard) == []


async def test_a_note_of_another_type_is_passed_over(
    directory: ChunkDirectory, redis: Redis, shard: str
) -> None:
    await redis.set(f"diptych:{{{shard}}}:holds:w1", "garbage")
    assert await directory.succeed(W1, E1) == 0
    await redis.delete(f"diptych:{{{shard}}}:holds:w1")
    await redis.sadd(f"diptych:{{{shard}}}:holds:w1", "no epoch")
    assert await directory.succeed(W1, E1) == 0
    await directory.sweep_worker(W1, E1)


async def test_any_number_is_handled_in_pieces(directory: ChunkDirectory, redis: Redis, shard: str) -> None:
    chunks = [chunk(i) for i in range(2 * PIECE + 1)]
    await directory.publish(W1, E1, dict.fromkeys(chunks, Tier.L1))
    await directory.publish(W2, E2, {chunks[0]: Tier.L1})

    assert len(await directory.locate(chunks, ALIVE)) == len(chunks)
    assert await directory.withdraw(W1, E1, chunks[: PIECE + 1]) == PIECE + 1
    assert await directory.sweep_worker(W1, E1) == PIECE
    assert await keys_of(redis, shard) == [
        f"diptych:{{{shard}}}:chunk:{chunks[0].hex()}",
        f"diptych:{{{shard}}}:holds:w2@{E2}",
    ]


async def test_entries_end_with_their_ttl(redis: Redis, shard: str) -> None:
    directory = ChunkDirectory(redis, shard, ttl_s=0.05)
    await directory.publish(W1, E1, {chunk(0): Tier.L1})

    async def is_gone() -> bool:
        return await keys_of(redis, shard) == []

    await eventually(is_gone)


async def test_garbage_is_passed_over(directory: ChunkDirectory, redis: Redis, shard: str) -> None:
    await redis.set(f"diptych:{{{shard}}}:chunk:{chunk(0).hex()}", "garbage")
    await directory.publish(W1, E1, {chunk(1): Tier.L1})
    await redis.hset(
        f"diptych:{{{shard}}}:chunk:{chunk(1).hex()}",
        mapping={
            "nobody": "l1",
            "new\nline": "l1",
            "tab\tbed": "l1",
            "": "",
            b"\xff": b"\xff",
            f"w2@{E2}": "l9",
        },
    )

    assert await directory.locate([chunk(0), chunk(1)], ALIVE) == {
        chunk(1): (ChunkLocation(W1, E1, Tier.L1),)
    }
    await directory.publish(W1, E1, {chunk(0): Tier.L1})
    assert chunk(0) in await directory.locate([chunk(0)], ALIVE)
    await redis.set(f"diptych:{{{shard}}}:chunk:{chunk(0).hex()}", "garbage")
    await redis.set(f"diptych:{{{shard}}}:holds:w1@1", "garbage")
    assert await directory.withdraw(W1, E1, [chunk(0), chunk(1)]) == 1
    assert await directory.sweep_worker(W1, E1) == 0
    await directory.publish(W1, E1, {chunk(0): Tier.L1})
    await redis.delete(f"diptych:{{{shard}}}:chunk:{chunk(1).hex()}")


async def test_the_publisher_tells_changes_in_batches(directory: ChunkDirectory) -> None:
    publisher = Publisher(directory, W1, E1, interval_s=0.01)
    for i in range(10):
        publisher.add(chunk(i), Tier.L1)
    publisher.remove(chunk(3))
    running = asyncio.create_task(publisher.run())

    async def is_told() -> bool:
        return publisher.num_pending == 0

    await eventually(is_told)
    assert set(await directory.locate([chunk(i) for i in range(10)], ALIVE)) == {
        chunk(i) for i in range(10) if i != 3
    }

    publisher.remove(chunk(4))
    await eventually(is_told)
    assert await directory.locate([chunk(4)], ALIVE) == {}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_one_flush_tells_one_piece(directory: ChunkDirectory) -> None:
    publisher = Publisher(directory, W1, E1)
    for i in range(PIECE + 1):
        publisher.add(chunk(i), Tier.L1)

    assert [await publisher.flush(), await publisher.flush(), await publisher.flush()] == [PIECE, 1, 0]


async def test_a_change_during_a_flush_is_not_lost(directory: ChunkDirectory) -> None:
    publisher = Publisher(directory, W1, E1)
    publisher.add(chunk(0), Tier.L1)
    flush = asyncio.create_task(publisher.flush())
    await asyncio.sleep(0)
    publisher.remove(chunk(0))
    await flush

    assert publisher.num_pending == 1
    await publisher.flush()
    assert await directory.locate([chunk(0)], ALIVE) == {}


async def test_the_publisher_waits_within_a_bound_for_the_store(
    redis: Redis, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ChunkDirectory(redis, shard)
    publisher = Publisher(directory, W1, E1, interval_s=0.001, max_pending=3)
    is_away, num_failed = True, 0
    publish = directory.publish

    async def sometimes(*args: object) -> None:
        nonlocal num_failed
        if is_away:
            num_failed += 1
            raise StoreUnavailable("away")
        await publish(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(directory, "publish", sometimes)
    for i in range(5):
        publisher.add(chunk(i), Tier.L1)
    assert (publisher.num_pending, publisher.num_dropped) == (3, 2)
    with pytest.raises(StoreUnavailable):
        await publisher.flush()
    running = asyncio.create_task(publisher.run())

    async def has_failed_thrice() -> bool:
        return num_failed >= 3

    await eventually(has_failed_thrice)
    assert publisher.num_pending == 3

    is_away = False

    async def is_told() -> bool:
        return publisher.num_pending == 0

    await eventually(is_told)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert set(await directory.locate([chunk(i) for i in range(5)], ALIVE)) == {chunk(2), chunk(3), chunk(4)}
    await directory.sweep_worker(W1, E1)
