"""The hands of the cache on a memory channel with faults: right bytes or none, no room given away early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import cast

import pytest

from diptych.domain.errors import (
    DigestMismatch,
    InvalidField,
    LayoutMismatch,
    PeerError,
    PeerLost,
    TransferFailed,
)
from diptych.domain.ids import ChunkHash, Epoch, WorkerId
from diptych.domain.records import Tier
from diptych.store.directory import ChunkDirectory
from diptych.store.publisher import Publisher
from diptych.transfer.faults import Faults
from diptych.transfer.memory import MemoryFabric
from services.cache.arena import ALIGN
from services.cache.loop import ChunkKeeper, Loan, host_memory
from services.cache.tiers import Chunk, HostTier, TierAudit
from tests.support.cache_rig import FINGERPRINT, NUM_TOKENS, OTHER_FINGERPRINT, WAIT_S, Offering, Worker

UNITS = 4


class Heard(Publisher):
    """What the directory would be told, without a store."""

    def __init__(self) -> None:
        super().__init__(cast("ChunkDirectory", None), WorkerId("cache"), Epoch(1))
        self.names: set[ChunkHash] = set()

    def add(self, chunk: ChunkHash, tier: Tier) -> None:
        assert tier is Tier.L2
        self.names.add(chunk)

    def remove(self, chunk: ChunkHash) -> None:
        self.names.remove(chunk)


class Rig:
    """One cache of `UNITS` chunks and its workers."""

    def __init__(self, *, max_leases: int = 8, max_lease_s: float = 60.0) -> None:
        self.fabric = MemoryFabric()
        self.faults = Faults()
        self.heard = Heard()
        self.known: set[str] = set()
        self.channel = self.fabric.open(faults=self.faults)
        self.keeper = ChunkKeeper(
            HostTier(UNITS * ALIGN, max_fills=2, max_leases=max_leases, max_lease_s=max_lease_s),
            host_memory(UNITS * ALIGN),
            self.channel,
            self.heard,
            lambda region: region.address in self.known,
        )
        self._workers: list[Worker] = []

    def worker(self, seed: int = 0) -> Worker:
        worker = Worker(self.fabric.open(), seed=seed)
        self.known.add(worker.region.address)
        self._workers.append(worker)
        return worker

    async def offer(
        self, offering: Offering, fingerprint: str = FINGERPRINT, timeout_s: float = WAIT_S
    ) -> bool:
        piece = offering.piece
        chunk = Chunk(offering.name, fingerprint, NUM_TOKENS, piece.num_bytes, offering.digest)
        async with asyncio.timeout(WAIT_S):
            return await self.keeper.offer(chunk, piece, timeout_s)

    def lend(self, offering: Offering, lease_s: float = 60.0) -> Loan:
        loan = self.keeper.lend(offering.name, FINGERPRINT, lease_s)
        assert loan
        assert loan.chunk.digest == offering.digest
        return loan

    async def until_reading(self, num_reads: int = 1) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.faults.num_reads < num_reads:
                await asyncio.sleep(0)

    async def close(self) -> None:
        await self.keeper.close()
        for worker in self._workers:
            await asyncio.to_thread(worker.channel.close)

    def assert_empty(self) -> None:
        """Nothing is left, here or in the directory, once the cache is dropped."""
        self.keeper.drop()
        assert self.keeper.audit() == TierAudit(0, 0, 0, 0, 0, UNITS * ALIGN)
        assert not self.heard.names
        assert not self.keeper._fills


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig()
        stack.push_async_callback(rig.close)
        yield rig
        rig.assert_empty()


async def test_what_is_offered_can_be_borrowed_and_read(rig: Rig) -> None:
    worker, other = rig.worker(), rig.worker(seed=1)
    offering = worker.chunk(0)
    assert await rig.offer(offering)
    assert rig.heard.names == {offering.name}
    loan = rig.lend(offering)
    assert loan.chunk.num_tokens == NUM_TOKENS
    assert await other.read(loan.piece) == offering.data
    assert rig.keeper.give_back(loan.lease_id)
    assert not rig.keeper.give_back(loan.lease_id)
    assert not await rig.offer(offering)
    assert rig.faults.num_reads == 1
    assert rig.keeper.counts == {"offer_stored": 1, "lend_hit": 1, "offer_held": 1}


async def test_corrupted_bytes_are_never_kept(rig: Rig) -> None:
    offering = rig.worker().chunk(0)
    rig.faults.corrupt(1)
    with pytest.raises(DigestMismatch):
        await rig.offer(offering)
    assert rig.keeper.lend(offering.name, FINGERPRINT, 1.0) is None
    assert not rig.heard.names
    assert await rig.offer(offering)
    assert rig.keeper.counts["offer_DigestMismatch"] == 1


async def test_a_source_that_dies_during_the_read(rig: Rig) -> None:
    worker = rig.worker()
    offering = worker.chunk(0)
    rig.faults.hold(1)
    offer = asyncio.create_task(rig.offer(offering))
    await rig.until_reading()
    await asyncio.to_thread(worker.channel.close)
    rig.faults.release(1)
    with pytest.raises(PeerLost):
        await offer
    assert rig.keeper.audit().used_bytes == 0


@pytest.mark.parametrize("fault", ["fail", "drop"])
async def test_a_read_that_fails_or_never_arrives(rig: Rig, fault: str) -> None:
    offering = rig.worker().chunk(0)
    getattr(rig.faults, fault)(1)
    with pytest.raises(TransferFailed):
        await rig.offer(offering, timeout_s=0.05)
    assert rig.keeper.audit().used_bytes == 0
    assert await rig.offer(offering)


async def test_who_is_not_registered_is_not_read(rig: Rig) -> None:
    worker = rig.worker()
    rig.known.clear()
    with pytest.raises(InvalidField, match="no registered worker"):
        await rig.offer(worker.chunk(0))
    assert rig.faults.num_reads == 0
    assert rig.keeper.counts == {"offer_unknown_source": 1}


async def test_an_offer_goes_on_when_its_caller_goes_away(rig: Rig) -> None:
    worker = rig.worker()
    rig.faults.hold(1)
    offer = asyncio.create_task(rig.offer(worker.chunk(0)))
    await rig.until_reading()
    offer.cancel()
    await asyncio.wait({offer})
    assert rig.keeper.audit().filling == 1
    for index in range(1, UNITS):
        assert await rig.offer(worker.chunk(index))
    # The room that the read may still write to is the only one that can't be had.
    assert await rig.offer(worker.chunk(UNITS))
    assert rig.keeper.counts["evicted"] == 1
    rig.faults.release(1)
    async with asyncio.timeout(WAIT_S):
        while rig.keeper.audit().filling:
            await asyncio.sleep(0)
    loan = rig.lend(worker.chunk(0))
    assert await worker.read(loan.piece) == worker.chunk(0).data
    rig.keeper.give_back(loan.lease_id)


async def test_two_offers_of_one_chunk_are_one_read(rig: Rig) -> None:
    worker, twin = rig.worker(), rig.worker()
    rig.faults.hold(1)
    first = asyncio.create_task(rig.offer(worker.chunk(0)))
    await rig.until_reading()
    assert not await rig.offer(twin.chunk(0))
    rig.faults.release(1)
    assert await first
    assert rig.faults.num_reads == 1


async def test_what_is_lent_survives_eviction_pressure(rig: Rig) -> None:
    worker = rig.worker()
    assert await rig.offer(worker.chunk(0))
    loan = rig.lend(worker.chunk(0))
    for index in range(1, 8):
        assert await rig.offer(worker.chunk(index))
    assert await worker.read(loan.piece) == worker.chunk(0).data
    others = [rig.lend(worker.chunk(index)) for index in range(5, 8)]
    assert not await rig.offer(worker.chunk(1))
    assert rig.keeper.counts["offer_no_room"] == 1
    for each in (loan, *others):
        rig.keeper.give_back(each.lease_id)
    assert await rig.offer(worker.chunk(1))


async def test_a_reader_that_comes_after_its_lease_gets_bytes_that_its_digest_refuses(rig: Rig) -> None:
    worker = rig.worker()
    assert await rig.offer(worker.chunk(0))
    loan = rig.lend(worker.chunk(0), lease_s=1e-6)
    async with asyncio.timeout(WAIT_S):
        while rig.keeper.audit().leases:
            await asyncio.sleep(0)
    for index in range(1, UNITS + 1):
        assert await rig.offer(worker.chunk(index))
    late = await worker.read(loan.piece)
    assert isinstance(late, bytes)
    assert late != worker.chunk(0).data
    assert not rig.keeper.give_back(loan.lease_id)


async def test_another_layout_is_a_miss_and_refused(rig: Rig) -> None:
    offering = rig.worker().chunk(0)
    assert await rig.offer(offering)
    assert rig.keeper.lend(offering.name, OTHER_FINGERPRINT, 1.0) is None
    with pytest.raises(LayoutMismatch):
        await rig.offer(offering, OTHER_FINGERPRINT)
    assert rig.keeper.counts["lend_foreign"] == 1


async def test_dropping_spares_what_is_lent(rig: Rig) -> None:
    worker = rig.worker()
    for index in range(2):
        assert await rig.offer(worker.chunk(index))
    loan = rig.lend(worker.chunk(0))
    assert rig.keeper.drop() == 1
    assert rig.heard.names == {worker.chunk(0).name}
    assert await worker.read(loan.piece) == worker.chunk(0).data
    rig.keeper.give_back(loan.lease_id)


async def test_a_directory_that_forgot_hears_everything_again(rig: Rig) -> None:
    worker = rig.worker()
    for index in range(3):
        assert await rig.offer(worker.chunk(index))
    loan = rig.lend(worker.chunk(0))
    told = set(rig.heard.names)
    rig.heard.names.clear()
    rig.keeper.republish()
    assert rig.heard.names == told == {worker.chunk(index).name for index in range(3)}
    rig.keeper.give_back(loan.lease_id)


async def test_settling_waits_for_loans_and_no_longer_than_its_deadline(rig: Rig) -> None:
    worker = rig.worker()
    assert await rig.offer(worker.chunk(0))
    loan = rig.lend(worker.chunk(0))
    assert not await rig.keeper.settle(time.monotonic(), lambda: True)
    assert await rig.keeper.settle(time.monotonic(), lambda: False)
    waiting = asyncio.create_task(rig.keeper.settle(time.monotonic() + WAIT_S, lambda: True))
    rig.keeper.give_back(loan.lease_id)
    assert await waiting


async def test_closing_ends_reads_under_way() -> None:
    rig = Rig()
    worker = rig.worker()
    assert await rig.offer(worker.chunk(1))
    rig.faults.hold(2)
    offer = asyncio.create_task(rig.offer(worker.chunk(0)))
    await rig.until_reading(2)
    loan = rig.lend(worker.chunk(1))
    async with asyncio.timeout(WAIT_S):
        await rig.keeper.close()
    with pytest.raises(TransferFailed):
        await offer
    assert isinstance(await worker.read(loan.piece), PeerError)
    with pytest.raises(TransferFailed):
        await rig.offer(worker.chunk(2))
    rig.keeper.give_back(loan.lease_id)
    await rig.close()
    rig.assert_empty()


def test_memory_that_cannot_be_had_is_named() -> None:
    with pytest.raises(InvalidField, match="budget_bytes"):
        host_memory(1 << 62)
