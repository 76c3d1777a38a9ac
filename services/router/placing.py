"""Where a waiting request goes: load, room, pressure, and how fast requests may move.

**Load is derived.** What a worker carries is the sum over the live requests that are on it, at the moment of
asking; no counter goes up and down. A request weighs its prompt and at most `output_reserve` tokens of its
output, because most outputs end long before their bound.

**Links count for prompts that are handed over**, those of more than a chunk. A decode worker that gets its
KV over links past their bound only weighs `LINK_SLACK` requests more, one that may not use them twice that:
it is taken when the others are that much busier, and never refused, for it can prefill by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from diptych.domain.errors import DiptychError
from diptych.domain.ids import CHUNK_TOKENS
from services.router.decisions import Arrival, Limits, Reason, WorkerRef
from services.router.prefixes import PrefixHomes
from services.router.states import State
from services.router.workers import Worker

LINK_SLACK: Final = 4


@dataclass(slots=True)
class Live:
    """One live request. `ref` is its worker while PLACED or CANCELLING, and None while QUEUED."""

    arrival: Arrival
    order: int
    deadline: float
    state: State = State.QUEUED
    ref: WorkerRef | None = None
    num_moves: int = 0
    """Workers that it left."""
    moved: Reason | None = None
    """Why it left the last of them."""
    cause: DiptychError | None = None
    """What happened to the first of them."""
    avoid: WorkerRef | None = None
    """Handed it back; not to be asked again before `avoid_until`."""
    avoid_until: float = 0.0

    @property
    def num_tokens(self) -> int:
        """What it may come to need, prompt and output."""
        return self.arrival.num_tokens + self.arrival.max_tokens

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Its place in the queue: those that lost their worker, then by priority, then by arrival."""
        return not self.num_moves, self.arrival.priority, self.order


@dataclass(frozen=True, slots=True)
class Load:
    """What we have on one worker."""

    num_requests: int = 0
    num_tokens: int = 0

    def plus(self, num_tokens: int) -> Load:
        return Load(self.num_requests + 1, self.num_tokens + num_tokens)


NO_LOAD = Load()


class Loads:
    """The load of each worker that has any: a snapshot of the live set, and what `choose` adds to it."""

    def __init__(self, lives: Iterable[Live], limits: Limits) -> None:
        self._limits = limits
        self._loads: dict[WorkerRef, Load] = {}
        for live in lives:
            if live.ref is not None:
                self.add(live.ref, live)

    def of(self, ref: WorkerRef) -> Load:
        return self._loads.get(ref, NO_LOAD)

    def add(self, ref: WorkerRef, live: Live) -> None:
        """Counts a request in that was placed after the snapshot."""
        self._loads[ref] = self.of(ref).plus(self._weight(live))

    def has_room(self, worker: Worker, live: Live) -> bool:
        """An empty worker always has: whatever may run at all must be able to."""
        load = self.of(worker.ref)
        most = worker.record.capacity_tokens * self._limits.max_overcommit
        return not load.num_requests or load.num_tokens + self._weight(live) <= most

    def choose(self, workers: Sequence[Worker], live: Live, homes: PrefixHomes) -> Worker:
        """The best of `workers`: fewest requests for its size, then fewest tokens, then near its prefill
        workers, then near us.

        One that may hold the request's prefix is better still, while it has at most `prefix_slack` requests
        more than it would take to be the best.
        """
        needs_kv = live.arrival.num_tokens > CHUNK_TOKENS
        pressures = {worker.ref: self._pressure(worker, needs_kv) for worker in workers}
        best = min(workers, key=lambda worker: pressures[worker.ref])
        least, prefix = pressures[best.ref][0], live.arrival.prefix
        holders = [
            worker
            for worker in workers
            if homes.num_held(prefix, worker.ref)
            and self._pressure(worker, needs_kv, self._limits.prefix_slack)[0] <= least
        ]
        if not holders:
            return best
        return min(holders, key=lambda worker: (-homes.num_held(prefix, worker.ref), pressures[worker.ref]))

    def _weight(self, live: Live) -> int:
        return live.arrival.num_tokens + min(live.arrival.max_tokens, self._limits.output_reserve)

    def _pressure(
        self, worker: Worker, needs_kv: bool, slack: int = 0
    ) -> tuple[float, float, int, bool, WorkerRef]:
        load, pool = self.of(worker.ref), worker.record.capacity_tokens
        num_requests = load.num_requests + worker.num_others - slack
        if needs_kv:
            num_requests += LINK_SLACK * worker.detour
        distance = worker.distance if needs_kv else 0
        is_far = worker.record.cell != self._limits.cell
        return num_requests / pool, load.num_tokens / pool, distance, is_far, worker.ref


class MoveRate:
    """A leaky bucket: `burst` moves at once, then `per_s` a second."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._interval_s = 1 / per_s
        self._slack_s = (burst - 1) / per_s
        self._next_at = 0.0

    def allows(self, now: float) -> bool:
        return self._next_at - now <= self._slack_s

    def take(self, now: float) -> None:
        """Counts one move."""
        self._next_at = max(self._next_at, now) + self._interval_s


class FinishRate:
    """How fast requests have ended of late: what a refused caller is told to wait is what the queue takes."""

    def __init__(self) -> None:
        self._finished_at: deque[float] = deque(maxlen=64)

    def add(self, now: float) -> None:
        """One request ended."""
        self._finished_at.append(now)

    def time_for_s(self, num_requests: int) -> float:
        """How long so many take to end, between 0.1 s and half a minute; 1 s while nothing is known."""
        if len(self._finished_at) < 2:
            return 1.0
        elapsed = self._finished_at[-1] - self._finished_at[0]
        return min(max(num_requests * elapsed / (len(self._finished_at) - 1), 0.1), 30.0)
