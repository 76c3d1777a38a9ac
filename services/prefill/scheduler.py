"""The prefill brain: which prompt tokens run in the next step, and which chunks are packed for reading.

    events (begin, borrowed chunk read, released, stop) and `now` in
    plan(now) → the runner → commit(plan, outcome, now);   next_pack(now) → the runner packs → packed(…)

A job takes the blocks of its whole prompt when it starts and gives them back when its last chunk is packed;
the chunks then live in the send ring until read. Only computing waits for blocks, only packing waits for
ring room, and nobody waits for blocks while holding a slot that its own reader can't free. Jobs start by
their places, and take their prompt tokens by turns (`order`), so that a short prompt is not behind all of a
long one.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter

from diptych.domain.engine_report import FailureInfo
from diptych.domain.errors import Internal, PeerError
from diptych.domain.fallbacks import Fallback
from diptych.domain.holding import KvPools
from diptych.domain.ids import BLOCK_TOKENS, CHUNK_TOKENS, RequestId
from diptych.domain.lifecycle import PrefillEvent, PrefillState
from diptych.domain.order import PromptTurns
from diptych.domain.plan import NOT_SAMPLED, BlockTables, SequenceStep, StepOutcome, StepPlan
from diptych.domain.slots import SlotRing
from services.prefill import admission
from services.prefill.admission import PrefillSettings
from services.prefill.effects import Borrow, Effects, Pack
from services.prefill.job import PrefillJob
from services.prefill.messages import (
    AttemptKey,
    AttemptOver,
    Begun,
    BorrowingOver,
    ManifestReady,
    Released,
    Stopped,
)
from services.prefill.sources import CACHE, DECODE, Sources
from services.prefill.steps import prefill_step


class PrefillScheduler:
    """All attempts of one prefill worker."""

    def __init__(
        self, pools: KvPools, sources: Sources, landing: SlotRing[AttemptKey], settings: PrefillSettings
    ) -> None:
        self._pools = pools
        self._sources = sources
        self._landing = landing
        self._settings = settings
        self._jobs: dict[AttemptKey, PrefillJob] = {}
        self._queue: list[PrefillJob] = []
        """Jobs with prompt tokens left to run, by their places."""
        self._by_request: dict[RequestId, AttemptKey] = {}
        self._effects = Effects()
        self._arrivals = 0
        self._turns = PromptTurns()
        self.counters: Counter[str] = Counter()

    @property
    def jobs(self) -> Mapping[AttemptKey, PrefillJob]:
        """All attempts that have not ended, in the order in which they came."""
        return self._jobs

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_queued(self) -> int:
        return sum(job.state is PrefillState.QUEUED for job in self._queue)

    def take_effects(self) -> Effects:
        """What is to be said since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    # Events.

    def begin(self, message: Begun, now: float) -> None:
        """A new attempt. It voids an earlier one of the same request; one that can't ever fit fails at
        once."""
        earlier = self._by_request.get(message.key.request_id)
        if message.key in self._jobs:
            return
        if earlier is not None:
            self.stop(Stopped(earlier))
        self._arrivals += 1
        job = PrefillJob(message, self._arrivals, now, self._pools.block_tokens)
        self._jobs[job.key] = job
        self._by_request[job.key.request_id] = job.key
        bisect.insort(self._queue, job, key=attrgetter("place"))
        problem = admission.refusal(job, self._pools, self._settings)
        if problem is not None:
            self._fail(job, problem)

    def released(self, message: Released) -> None:
        """A reader has ended its read of a chunk."""
        self._sources.release(message.key, message.index, message.reader)
        job = self._jobs.get(message.key)
        if job is not None and job.state is PrefillState.ANNOUNCED:
            self._end_if_read(job)

    def stop(self, message: Stopped) -> None:
        """Nobody wants more of this attempt. Its blocks, and its slots but for the cache's, are free at
        once."""
        job = self._jobs.get(message.key)
        if job is not None:
            self._end(job, PrefillEvent.CANCEL)

    def borrow_read(self, borrow: Borrow, error: PeerError | None) -> BlockTables | None:
        """A borrowed chunk was read and checked, or not; its slot is free from the next call on.

        The tables are those to unpack it into at once, before `borrow_unpacked`. None: not wanted any more.
        """
        self._landing.release(borrow.slot)
        job = self._jobs.get(borrow.key)
        if job is None or job.holding is None:
            return None
        job.reading = False
        if error is None:
            return job.holding.tables
        self.counters[Fallback.BORROW_FAILED] += 1
        job.fallbacks[Fallback.BORROW_FAILED] += 1
        job.borrowed.clear()
        self._settle_loan(job)
        return None

    def borrow_unpacked(self, borrow: Borrow) -> None:
        """A borrowed chunk lies in its job's blocks."""
        job = self._jobs[borrow.key]
        if job.holding is not None:
            job.num_computed = job.num_cached = (borrow.chunk.index + 1) * CHUNK_TOKENS
            job.num_borrowed += 1
            job.holding.publish_upto(job.num_computed, job.hashes)
            self._settle_loan(job)

    # Plan and commit.

    def next_borrow(self, now: float) -> Borrow | None:
        """The next borrowed chunk to read, one at a time a job. Chunks that are here already are passed
        over."""
        for job in self._queue:
            if job.state is not PrefillState.COMPUTING or job.reading:
                continue
            while job.borrowed and not job.extends(job.borrowed[0]):
                job.borrowed.popleft()
            slot = self._landing.take(job.key, now, math.inf) if job.borrowed else None
            if slot is not None:
                job.reading = True
                return Borrow(job.key, job.borrowed.popleft(), slot)
            self._settle_loan(job)
        return None

    def plan(self, now: float) -> StepPlan:
        """What runs in the next step: up to a chunk's worth of tokens together."""
        for key in self._sources.expire(now):
            if key in self._jobs:
                self._fail(
                    self._jobs[key], FailureInfo("DeadlineExceeded", "a chunk was not read within its lease")
                )
        self._admit(now)
        budget = self._settings.step_tokens
        steps: list[SequenceStep] = []
        ready = [job for job in self._queue if job.holding is not None and not job.borrowing]
        for job in self._turns.sorted(ready, attrgetter("num_left")):
            steps.append(prefill_step(job, budget))
            budget -= len(steps[-1].tokens)
            if not budget:
                break
        return StepPlan(tuple(steps))

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> None:
        """Takes in what a step gave. After an aborted one the same tokens are planned again."""
        if outcome.aborted:
            return
        for step, token in zip(plan.steps, outcome.tokens, strict=True):
            job = self._jobs[self._by_request[step.request_id]]
            if job.holding is None:
                raise Internal(f"{job.key} ran without blocks")
            job.num_computed = step.start + len(step.tokens)
            job.holding.publish_upto(job.num_computed, job.hashes)
            if token != NOT_SAMPLED:
                job.first_token = token
                job.computed_at = now
                self._queue.remove(job)

    def next_pack(self, now: float) -> Pack | None:
        """The next computed chunk for which the ring has room, oldest job first."""
        for job in self._jobs.values():
            if job.state is not PrefillState.COMPUTING or job.all_packed or job.holding is None:
                continue
            start, end = job.num_announced, job.next_chunk_end
            if job.num_computed < end:
                continue
            whole = self._settings.offer_chunks and end % CHUNK_TOKENS == 0 and start == end - CHUNK_TOKENS
            readers = {DECODE, CACHE} if whole else {DECODE}
            slot = self._sources.open(job.key, job.num_packed, readers, now)
            if slot is None:
                return None
            names = self._names(job, start, end) if whole else (b"", b"")
            return Pack(job.key, job.num_packed, start, end - start, job.holding.tables, slot, *names)
        return None

    def packed(self, pack: Pack) -> None:
        """A chunk lies in its slot and is being announced."""
        job = self._jobs[pack.key]
        job.num_packed += 1
        job.num_announced = pack.start + pack.num_tokens
        if job.all_packed and job.first_token is not None and job.holding is not None:
            job.holding.release()
            job.holding = None
            job.advance(PrefillEvent.LAST_CHUNK)
            self._effects.manifests.append(
                ManifestReady(
                    job.key, job.num_packed, len(job.tokens), self._settings.fingerprint, job.first_token,
                    job.computed_at - job.started_at, job.num_cached, job.num_borrowed * CHUNK_TOKENS,
                    dict(job.fallbacks), job.computed_at,
                )
            )  # fmt: skip
            self._end_if_read(job)

    def check_idle(self) -> None:
        """Raises Internal unless, with no attempt live, nothing belongs to one. Chunks that the cache still
        reads may be there: their leases end them."""
        self._pools.check_integrity([])
        self._sources.check_integrity()
        self._landing.check_integrity()
        if self._jobs or self._queue or self._by_request or self._landing.audit().taken:
            raise Internal(f"left: {list(self._by_request)}, {self._landing.audit()}")

    def assert_empty(self) -> None:
        """Raises Internal unless nothing is left of any attempt."""
        self.check_idle()
        if self._sources.ring.audit().taken:
            raise Internal(f"left: {self._sources.ring.audit()}")

    def _admit(self, now: float) -> None:
        for job in self._queue:
            if job.state is not PrefillState.QUEUED:
                continue
            limit = len(job.tokens) - 1
            if not self._pools.can_open(job.hashes, limit, len(job.tokens)):
                return
            job.holding = self._pools.open(job.hashes, limit)
            job.holding.grow(len(job.tokens))
            job.num_computed = job.num_cached = job.holding.num_cached_tokens
            job.started_at = now
            job.advance(PrefillEvent.START)

    def _names(self, job: PrefillJob, start: int, end: int) -> tuple[bytes, bytes]:
        """Hashes of a whole chunk and of the one before it: only blocks of the common size have them."""
        size = self._pools.block_tokens
        if size != BLOCK_TOKENS:
            return b"", b""
        return job.hashes[end // size - 1], job.hashes[start // size - 1] if start else b""

    def _settle_loan(self, job: PrefillJob) -> None:
        if job.lent and not job.borrowing:
            job.lent = False
            self._effects.borrowing_over.append(BorrowingOver(job.key, job.num_borrowed))

    def _end_if_read(self, job: PrefillJob) -> None:
        if not self._sources.read_by(job.key, DECODE):
            self._end(job, PrefillEvent.ALL_RELEASED)

    def _fail(self, job: PrefillJob, failure: FailureInfo) -> None:
        self.counters["attempt_failed"] += 1
        self._end(job, PrefillEvent.FAIL, failure)

    def _end(self, job: PrefillJob, event: PrefillEvent, failure: FailureInfo | None = None) -> None:
        job.advance(event)
        del self._jobs[job.key]
        if self._by_request.get(job.key.request_id) == job.key:
            del self._by_request[job.key.request_id]
        if job in self._queue:
            self._queue.remove(job)
        if job.holding is not None:
            job.holding.release()
            job.holding = None
        self._sources.release_all(job.key, DECODE)
        job.reading = False
        job.borrowed.clear()
        self._settle_loan(job)
        self._effects.over.append(AttemptOver(job.key, failure))
