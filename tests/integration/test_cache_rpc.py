"""The cache over gRPC, with a real store: what its callers see, from the first offer to the last loan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diptych.domain.errors import Draining, StoreUnavailable
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import ChunkLocation, Tier
from diptych.rpc.chunks import Lent, Missed, Offered
from diptych.v1 import worker_pb2
from services.cache.arena import ALIGN
from tests.support.cache_rig import FINGERPRINT, NUM_TOKENS, OTHER_FINGERPRINT, WAIT_S, Worker
from tests.support.cache_service import UNITS, Make, ServiceRig, cache_services
from tests.support.valkey import eventually


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with cache_services(tmp_path) as make:
        yield make


async def eventually_reading(rig: ServiceRig) -> None:
    async def is_reading() -> bool:
        return rig.faults.num_reads > 0

    await eventually(is_reading)


async def test_a_chunk_from_offer_to_give_back(make: Make) -> None:
    rig = await make()
    offering = rig.worker.chunk(0)
    assert await rig.offer(offering) == Offered(True, "stored")
    assert await rig.offer(offering) == Offered(False, "not_wanted")
    mine = (WorkerId("cache"), rig.service.epoch)

    async def is_located() -> bool:
        found = await rig.directory.locate([offering.name], {mine})
        return found == {offering.name: (ChunkLocation(*mine, Tier.L2),)}

    await eventually(is_located)
    lent = await rig.lend(offering)
    assert isinstance(lent, Lent)
    assert (lent.num_tokens, lent.digest) == (NUM_TOKENS, offering.digest)
    assert await rig.worker.read(lent.piece) == offering.data
    status = await rig.status()
    assert (status.load.slots_used, status.load.bytes_used, status.load.bytes_total) == (
        1,
        ALIGN,
        UNITS * ALIGN,
    )
    assert (status.worker_id, status.role, status.epoch) == (
        "cache",
        worker_pb2.ROLE_CACHE,
        rig.service.epoch,
    )
    assert {c.reason: c.count for c in status.counters} == {"lend_hit": 1, "offer_held": 1, "offer_stored": 1}
    assert (await rig.inspector.DropCache(worker_pb2.DropCacheRequest())).num_dropped == 0
    assert await rig.give_back(lent.lease_id)
    assert (await rig.inspector.DropCache(worker_pb2.DropCacheRequest())).num_dropped == 1
    assert await rig.lend(offering) == Missed("absent")
    assert (await rig.status()).load.bytes_used == 0

    async def is_withdrawn() -> bool:
        return not await rig.located(offering)

    await eventually(is_withdrawn)


async def test_failures_come_back_as_a_reason(make: Make) -> None:
    rig = await make()
    rig.faults.corrupt(1)
    rig.faults.fail(2)
    assert await rig.offer(rig.worker.chunk(0)) == Offered(False, "DigestMismatch")
    assert await rig.offer(rig.worker.chunk(0)) == Offered(False, "TransferFailed")
    assert await rig.lend(rig.worker.chunk(0)) == Missed("absent")
    assert await rig.offer(rig.worker.chunk(0)) == Offered(True, "stored")
    assert await rig.offer(rig.worker.chunk(0), OTHER_FINGERPRINT) == Offered(False, "LayoutMismatch")
    assert await rig.lend(rig.worker.chunk(0), OTHER_FINGERPRINT) == Missed("absent")
    stranger = Worker(rig.fabric.open())
    assert await rig.offer(stranger.chunk(1)) == Offered(False, "InvalidField")
    await asyncio.to_thread(stranger.channel.close)


async def test_a_cache_that_is_gone_is_a_miss(make: Make) -> None:
    rig = await make()
    await rig.leave()
    assert await rig.offer(rig.worker.chunk(0)) == Offered(False, "PeerLost")
    assert await rig.lend(rig.worker.chunk(0)) == Missed("PeerLost")
    assert not await rig.give_back(1)


async def test_a_deadline_bounds_the_read(make: Make) -> None:
    rig = await make(read_s=0.05)
    rig.faults.drop(1)
    assert await rig.offer(rig.worker.chunk(0)) == Offered(False, "TransferFailed")
    assert (await rig.status()).load.bytes_used == 0


async def test_the_callers_deadline_bounds_the_read_too(make: Make) -> None:
    rig = await make()
    rig.faults.drop(1)
    offering = rig.worker.chunk(0)
    offered = await rig.client.offer(
        rig.service.address,
        chunk_hash=offering.name,
        fingerprint=FINGERPRINT,
        num_tokens=NUM_TOKENS,
        piece=offering.piece,
        digest=offering.digest,
        timeout_s=0.1,
    )
    assert offered.reason in {"DeadlineExceeded", "TransferFailed"}  # both ends hold it; either may be first

    async def is_over() -> bool:
        return (await rig.status()).load.bytes_used == 0

    await eventually(is_over)


async def test_leases_of_nobody_are_given_back_harmlessly(make: Make) -> None:
    rig = await make()
    await rig.offer(rig.worker.chunk(0))
    lent = await rig.lend(rig.worker.chunk(0))
    assert isinstance(lent, Lent)
    for lease_id in (0, 1, lent.lease_id ^ 1, 2**64 - 1):
        assert await rig.give_back(lease_id)
    assert (await rig.status()).load.slots_used == 1
    assert await rig.give_back(lent.lease_id)
    assert await rig.give_back(lent.lease_id)
    assert (await rig.status()).load.slots_used == 0


async def test_the_limits_of_the_settings_hold(make: Make) -> None:
    rig = await make(max_reads=1, max_leases=1, max_lease_s=0.05)
    rig.faults.hold(1)
    held = asyncio.create_task(rig.offer(rig.worker.chunk(0)))
    await eventually_reading(rig)
    assert await rig.offer(rig.worker.chunk(1)) == Offered(False, "not_wanted")
    rig.faults.release(1)
    assert (await held).stored
    first = await rig.lend(rig.worker.chunk(0))
    assert isinstance(first, Lent)
    assert await rig.lend(rig.worker.chunk(0)) == Missed("absent")

    async def is_over() -> bool:
        return (await rig.status()).load.slots_used == 0

    await eventually(is_over)
    counts = {counter.reason: counter.count for counter in (await rig.status()).counters}
    assert counts == {"lend_hit": 1, "lend_leases": 1, "offer_busy": 1, "offer_stored": 1}
    assert (await rig.status()).load.slots_total == 1


async def test_leaving_waits_for_loans_and_takes_nothing_more(make: Make) -> None:
    rig = await make(drain_s=WAIT_S)
    offering = rig.worker.chunk(0)
    await rig.offer(offering)
    lent = await rig.lend(offering)
    assert isinstance(lent, Lent)
    leaving = asyncio.create_task(rig.leave())

    async def is_withdrawn() -> bool:
        return not await rig.located(offering)

    await eventually(is_withdrawn)
    assert await rig.offer(rig.worker.chunk(1)) == Offered(False, Draining.__name__)
    assert await rig.lend(offering) == Missed(Draining.__name__)
    assert await rig.worker.read(lent.piece) == offering.data
    assert "cache" in {peer.worker_id for peer in await rig.registry.alive()}
    assert not leaving.done()
    assert await rig.give_back(lent.lease_id)
    async with asyncio.timeout(WAIT_S):
        await leaving
    assert {peer.worker_id for peer in await rig.registry.alive()} == {"decode"}


async def test_leaving_is_bounded_when_a_borrower_died(make: Make) -> None:
    rig = await make(drain_s=0.05)
    await rig.offer(rig.worker.chunk(0))
    assert isinstance(await rig.lend(rig.worker.chunk(0)), Lent)
    async with asyncio.timeout(WAIT_S):
        await rig.leave()


async def test_leaving_waits_for_no_loan_when_everybody_has_left(make: Make) -> None:
    rig = await make(drain_s=600.0, heartbeat_s=0.02)
    await rig.offer(rig.worker.chunk(0))
    assert isinstance(await rig.lend(rig.worker.chunk(0)), Lent)
    await rig.registry.deregister(WorkerId("decode"), Epoch(1))
    async with asyncio.timeout(WAIT_S):
        await rig.leave()


async def test_a_flushed_store_hears_of_every_chunk_again(make: Make) -> None:
    rig = await make(heartbeat_s=0.02)
    offerings = [rig.worker.chunk(index) for index in range(3)]
    for offering in offerings:
        await rig.offer(offering)

    async def all_located() -> bool:
        return await rig.located(*offerings) == {offering.name for offering in offerings}

    await eventually(all_located)
    await rig.redis.flushall()
    await eventually(all_located)


async def test_without_its_store_it_still_serves_and_is_found_again_with_it(make: Make) -> None:
    rig = await make(heartbeat_s=0.02, ttl_s=0.2)
    await asyncio.to_thread(rig.server.stop)

    async def is_alone() -> bool:
        return not rig.service.membership.available

    await eventually(is_alone)
    offering = rig.worker.chunk(0)
    assert await rig.offer(offering) == Offered(True, "stored")
    assert isinstance(lent := await rig.lend(offering), Lent)
    assert await rig.give_back(lent.lease_id)
    await asyncio.to_thread(rig.server.start)

    async def is_found() -> bool:
        try:
            return bool(await rig.located(offering))
        except StoreUnavailable:
            return False

    await eventually(is_found)
