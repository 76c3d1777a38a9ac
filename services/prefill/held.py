"""What a prefill engine holds, and for whom (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.domain.audit import Held, blocks_of, bounded
from diptych.domain.slots import SlotRing
from services.prefill.messages import AttemptKey
from services.prefill.scheduler import PrefillScheduler
from services.prefill.sources import Sources


def held_by(
    scheduler: PrefillScheduler, sources: Sources, landing: SlotRing[AttemptKey], now: float
) -> tuple[list[Held], int]:
    """The oldest of each kind, and how many there are in all."""
    total = scheduler.num_jobs + sources.ring.audit().taken + landing.audit().taken
    return bounded(_attempts(scheduler, now), _chunks(sources, now), _borrows(landing, now)), total


def attempt_name(key: AttemptKey) -> str:
    """The same in every process that tells of an attempt."""
    return f"{key.request_id}/{key.attempt}"


def _attempts(scheduler: PrefillScheduler, now: float) -> Iterator[Held]:
    for job in scheduler.jobs.values():
        num_blocks = blocks_of(job.holding.tables) if job.holding is not None else 0
        age_s = now - job.started_at if job.started_at else 0.0
        yield Held("attempt", attempt_name(job.key), "", age_s, num_blocks)


def _chunks(sources: Sources, now: float) -> Iterator[Held]:
    """Their readers own them; the lease bounds it."""
    for slot in sources.ring.taken:
        key, index = slot.owner
        readers = ", ".join(sources.readers(key, index))
        name = f"{attempt_name(key)} chunk {index}"
        yield Held("chunk", name, readers, now - slot.taken_at, ends_in_s=slot.lease_end - now)


def _borrows(landing: SlotRing[AttemptKey], now: float) -> Iterator[Held]:
    for slot in landing.taken:
        yield Held("borrow", attempt_name(slot.owner), "", now - slot.taken_at)
