"""What a decode engine holds, and for whom (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.domain.audit import Held, blocks_of, bounded
from diptych.domain.slots import SlotRing
from services.decode.effects import ReadKey
from services.decode.handoffs import Handoffs
from services.decode.scheduler import DecodeScheduler


def held_by(
    scheduler: DecodeScheduler, handoffs: Handoffs, ring: SlotRing[ReadKey], now: float
) -> tuple[list[Held], int]:
    """The oldest of each kind, and how many there are in all."""
    total = len(scheduler.live) + handoffs.num_unclaimed + len(handoffs.landings) + ring.audit().taken
    kinds = (
        _requests(scheduler, now),
        _jobs(handoffs, now),
        _attempts(handoffs, now),
        _reads(handoffs, ring, now),
    )
    return bounded(*kinds), total


def _requests(scheduler: DecodeScheduler, now: float) -> Iterator[Held]:
    for request in scheduler.live.values():
        num_blocks = blocks_of(request.holding.tables) if request.holding is not None else 0
        yield Held("request", request.request_id, "", now - request.costs.submitted_at, num_blocks)


def _jobs(handoffs: Handoffs, now: float) -> Iterator[Held]:
    for request_id, job in handoffs.unclaimed.items():
        yield Held("job", request_id, "bus", now - job.posted_at, ends_in_s=job.deadline - now)


def _attempts(handoffs: Handoffs, now: float) -> Iterator[Held]:
    for request_id, landing in handoffs.landings.items():
        name = f"{request_id}/{landing.attempt}"
        end = landing.begun_at + handoffs.settings.attempt_timeout_s
        yield Held("attempt", name, landing.prefill_worker, now - landing.begun_at, ends_in_s=end - now)


def _reads(handoffs: Handoffs, ring: SlotRing[ReadKey], now: float) -> Iterator[Held]:
    """Those of void attempts too: their slots belong to the channel until they end."""
    for slot in ring.taken:
        key = slot.owner
        landing = handoffs.landing(key.request_id)
        owner = landing.prefill_worker if landing is not None and landing.attempt == key.attempt else ""
        end = slot.taken_at + handoffs.settings.read_timeout_s
        name = f"{key.request_id}/{key.attempt} chunk {key.index}"
        yield Held("read", name, owner, now - slot.taken_at, ends_in_s=end - now)
