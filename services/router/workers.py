"""The decode workers as the policy sees them: listed in the registry, and linked by a session of ours.

A request is placed only on a worker that is both. They fail apart: a worker that leaves the registry finishes
what it has (it drains, or the store lost its memory), while one whose session broke has lost our requests,
whatever the registry still says.

    DIALLING ──session up──▶ UP ──session lost──▶ DOWN ──redial, with back-off──▶ DIALLING
        └───────────────── session lost ───────────▲
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from diptych.domain.records import WorkerRecord
from services.router.decisions import WorkerRef


class Link(Enum):
    """How our session with a worker stands."""

    DIALLING = "dialling"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class Worker:
    """One start of one decode worker."""

    record: WorkerRecord
    listed: bool = True
    link: Link = Link.DIALLING
    redial_at: float = 0.0
    num_failures: int = 0
    """Sessions lost since the last one that came up."""
    num_others: int = 0
    """Other routers' requests on it, as of its last sign of life."""

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.record.worker_id, self.record.epoch)

    @property
    def detour(self) -> int:
        """How KV from elsewhere would reach it: 0 over a link within its bound, or nothing is known; 1 over
        slower ones only; 2 not at all, for it was told not to use them."""
        links = self.record.load.links
        if not links or any(not link.too_slow for link in links):
            return 0
        return 1 if any(link.used for link in links) else 2

    @property
    def distance(self) -> int:
        """Of the nearest prefill worker, in powers of two of a microsecond: less is noise. 0: not known."""
        rtts = [link.rtt_s for link in self.record.load.links if link.used and link.rtt_s > 0]
        return round(min(rtts) * 1e6).bit_length() if rtts else 0

    @property
    def usable(self) -> bool:
        """Whether it may be given requests."""
        return self.listed and self.link is Link.UP

    def share_tokens(self, max_share: float) -> int:
        """Most tokens, prompt and output, that one request may need of its pool (M13)."""
        return math.floor(self.record.capacity_tokens * max_share)

    def holds(self, num_tokens: int, max_share: float) -> bool:
        """Whether a request of so many tokens, prompt and output, can ever run there."""
        context = self.record.max_context
        return num_tokens <= self.share_tokens(max_share) and (not context or num_tokens <= context)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that any listed worker allows, in tokens of prompt and output together."""

    max_context: int
    share_tokens: int
    capacity_tokens: int


def bounds_of(workers: Iterable[Worker], max_share: float) -> Bounds | None:
    """None while no worker is listed. A worker that does not tell its context bounds it by its pool only."""
    listed = [worker for worker in workers if worker.listed]
    if not listed:
        return None
    return Bounds(
        max(worker.record.max_context or worker.record.capacity_tokens for worker in listed),
        max(worker.share_tokens(max_share) for worker in listed),
        max(worker.record.capacity_tokens for worker in listed),
    )
