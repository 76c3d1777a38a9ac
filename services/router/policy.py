"""The router's brain: which decode worker serves a request, who waits, who is refused, and who moves on.

Pure and synchronous: what happened and `now` go in, decisions come out; nothing is decided anywhere else.
Rules:

- **Least loaded first** (`placing`): requests per token of pool (ours, and others' as of its last heartbeat),
  then tokens, then our own cell; a worker that lately had the same prefix is preferred while it has little
  more. A worker takes `max_overcommit` times its pool and no more; the rest waits here, where the first
  worker with room takes it.
- **One queue, bounded in length and in time.** First come those that lost their worker, then by priority,
  then by arrival. Nobody overtakes on a worker for which somebody ahead waits: large ones are not starved.
- **Losing a worker is no storm.** Its requests move on at `moves_per_s`, each at most `max_moves` times: a
  request that kills whoever takes it stops there, and its client hears the first cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from diptych.domain.errors import (
    Cancelled,
    DiptychError,
    Internal,
    Overloaded,
    PeerLost,
    TooLarge,
)
from diptych.domain.ids import RequestId
from diptych.domain.records import WorkerRecord
from services.router.decisions import (
    Abort,
    Arrival,
    Decision,
    Dial,
    End,
    HangUp,
    Limits,
    Place,
    Reason,
    WorkerRef,
)
from services.router.placing import FinishRate, Live, Loads, MoveRate
from services.router.prefixes import PrefixHomes
from services.router.states import Event, State, advance
from services.router.workers import Bounds, Link, Worker, bounds_of


class RouterPolicy:
    """See the module. Not thread-safe; used by one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._workers: dict[WorkerRef, Worker] = {}
        self._live: dict[RequestId, Live] = {}
        self._homes = PrefixHomes()
        self._num_arrivals = 0
        self._move_rate = MoveRate(limits.moves_per_s, limits.move_burst)
        self._finish_rate = FinishRate()
        self.counters: Counter[Reason] = Counter()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_queued(self) -> int:
        return sum(live.state is State.QUEUED for live in self._live.values())

    @property
    def bounds(self) -> Bounds | None:
        """What a request may need at most; None while no worker is known."""
        return bounds_of(self._workers.values(), self._limits.max_share)

    @property
    def usable(self) -> list[WorkerRef]:
        """Workers that may be given requests."""
        return [ref for ref, worker in self._workers.items() if worker.usable]

    def is_cancelling(self, request_id: RequestId) -> bool:
        """Whether nobody wants a live request any more."""
        live = self._live.get(request_id)
        return live is not None and live.state is State.CANCELLING

    def worker_of(self, request_id: RequestId) -> WorkerRef | None:
        """Where a live request is; None while it waits."""
        live = self._live.get(request_id)
        return live.ref if live else None

    def loads(self) -> Loads:
        """What each worker carries now."""
        return Loads(self._live.values(), self._limits)

    def set_workers(self, records: Iterable[WorkerRecord], now: float) -> list[Decision]:
        """The registry's view: all workers known alive. Those of other roles or models are passed over."""
        listed = {WorkerRef(r.worker_id, r.epoch): r for r in records if self._serves(r)}
        names = {ref.worker_id for ref in listed}
        loads = self.loads()
        decisions: list[Decision] = []
        for ref, worker in list(self._workers.items()):
            worker.listed = ref in listed
            if not worker.listed and ref.worker_id in names:
                cause = PeerLost(f"{ref} was started anew")
                decisions += self._lose(worker, Reason.WORKER_REPLACED, cause, now)
                decisions.append(self._forget(worker))
        for ref, record in listed.items():
            if ref not in self._workers:
                self._workers[ref] = Worker(record)
                decisions.append(Dial(ref, record))
            worker = self._workers[ref]
            worker.record = record
            reported = record.load.num_running + record.load.num_waiting
            worker.num_others = max(0, reported - loads.of(ref).num_requests)
        return decisions + self._place(now)

    def link_up(self, ref: WorkerRef, now: float) -> list[Decision]:
        """A session is open."""
        worker = self._workers.get(ref)
        if worker is None or worker.link is not Link.DIALLING:
            return []
        worker.link, worker.num_failures = Link.UP, 0
        return self._place(now)

    def link_lost(self, ref: WorkerRef, reason: Reason, cause: DiptychError, now: float) -> list[Decision]:
        """A session broke, fell silent, or could not be opened."""
        worker = self._workers.get(ref)
        if worker is None:
            return []
        decisions = self._lose(worker, reason, cause, now)
        if not worker.listed:
            decisions.append(self._forget(worker))
        return decisions + self._place(now)

    def arrive(self, arrival: Arrival, now: float) -> list[Decision]:
        """Admits a request. Raises TooLarge, or Overloaded with a time to retry after; then it is not
        live."""
        if arrival.request_id in self._live:
            raise Internal(f"{arrival.request_id} is live already")
        live = Live(arrival, self._num_arrivals, now + self._limits.max_wait_s)
        self._num_arrivals += 1
        if self._fits_nowhere(live):
            raise self._too_large(live)
        self._live[arrival.request_id] = live
        decisions = self._place(now)
        if live.state is State.QUEUED and self._num_new() > self._limits.max_queue:
            del self._live[arrival.request_id]
            self.counters[Reason.QUEUE_FULL] += 1
            raise Overloaded(
                f"the queue is full ({self._limits.max_queue} requests)",
                self._finish_rate.time_for_s(self.num_queued),
            )
        return decisions

    def is_linked(self, ref: WorkerRef) -> bool:
        """Whether a session with that start of a worker is open, listed or not."""
        worker = self._workers.get(ref)
        return worker is not None and worker.link is Link.UP

    def knows(self, ref: WorkerRef) -> bool:
        """Whether that start of a worker is in the registry, or serves us still."""
        return ref in self._workers

    def adopt(self, arrival: Arrival, ref: WorkerRef, now: float) -> None:
        """A request that runs on `ref`, with which a session is open, is ours from now on. Nothing happens
        where it is already."""
        if arrival.request_id in self._live:
            return
        if not self.is_linked(ref):
            raise Internal(f"{arrival.request_id} was adopted on {ref}, which is not linked")
        live = Live(arrival, self._num_arrivals, now + self._limits.max_wait_s)
        self._num_arrivals += 1
        live.state, live.ref = advance(live.state, Event.PLACE), ref
        self._live[arrival.request_id] = live
        self.counters[Reason.ROUTER_LOST] += 1

    def finish(self, request_id: RequestId, now: float) -> list[Decision]:
        """Its worker said the last word."""
        if request_id not in self._live:
            return []
        self._end(self._live[request_id], Event.FINISH)
        self._finish_rate.add(now)
        return self._place(now)

    def hand_back(
        self, request_id: RequestId, ref: WorkerRef, cause: DiptychError, now: float
    ) -> list[Decision]:
        """Its worker does not want it (it drains, or is full); another may."""
        live = self._live.get(request_id)
        if live is None or live.ref != ref:
            return []
        live.avoid, live.avoid_until = ref, now + self._limits.redial_max_s
        return self._move(live, Reason.HANDED_BACK, cause, now) + self._place(now)

    def cancel(self, request_id: RequestId, reason: Reason, now: float) -> list[Decision]:
        """Nobody wants it any more. A placed one stays until its worker confirms, for `cancel_wait_s` at
        most."""
        live = self._live.get(request_id)
        if live is None or live.state is State.CANCELLING:
            return []
        self.counters[reason] += 1
        if live.ref is None:
            self._end(live, Event.CANCEL)
            return [End(request_id, Cancelled("cancelled while it waited")), *self._place(now)]
        live.state = advance(live.state, Event.CANCEL)
        live.deadline = now + self._limits.cancel_wait_s
        return [Abort(request_id, live.ref)]

    def tick(self, now: float) -> list[Decision]:
        """What time alone brings: redials, waits that ran out, workers that left and hold nothing of ours."""
        decisions: list[Decision] = []
        loads = self.loads()
        for worker in list(self._workers.values()):
            if not worker.listed and not loads.of(worker.ref).num_requests:
                decisions.append(self._forget(worker))
            elif worker.link is Link.DOWN and worker.redial_at <= now:
                worker.link = Link.DIALLING
                decisions.append(Dial(worker.ref, worker.record))
        waiting = [live for live in self._live.values() if live.state is not State.PLACED]
        for live in waiting:
            if live.deadline <= now:
                decisions.append(self._run_out(live))
            elif live.state is State.QUEUED and not live.num_moves and self._fits_nowhere(live):
                # It came while no worker was known.
                self._end(live, Event.FAIL)
                decisions.append(End(live.arrival.request_id, self._too_large(live)))
        return decisions + self._place(now)

    def _serves(self, record: WorkerRecord) -> bool:
        return record.role.decodes and record.model == self._limits.model

    def _holds(self, worker: Worker, live: Live) -> bool:
        return worker.holds(live.num_tokens, self._limits.max_share)

    def _fits_nowhere(self, live: Live) -> bool:
        known = [worker for worker in self._workers.values() if worker.listed]
        return bool(known) and not any(self._holds(worker, live) for worker in known)

    def _too_large(self, live: Live) -> TooLarge:
        self.counters[Reason.TOO_LARGE] += 1
        return TooLarge(f"{live.num_tokens} tokens of prompt and output fit on no decode worker")

    def _num_new(self) -> int:
        return sum(live.state is State.QUEUED and not live.num_moves for live in self._live.values())

    def _place(self, now: float) -> list[Decision]:
        """Gives waiting requests, in their order, to workers with room."""
        waiting = [live for live in self._live.values() if live.state is State.QUEUED]
        usable = [worker for worker in self._workers.values() if worker.usable]
        if not waiting or not usable:
            return []
        loads = self.loads()
        kept: set[WorkerRef] = set()
        decisions: list[Decision] = []
        for live in sorted(waiting, key=lambda live: live.rank):
            if live.num_moves and not self._move_rate.allows(now):
                continue
            asked = [worker for worker in usable if self._may_ask(worker, live, now)]
            open_ = [worker for worker in asked if worker.ref not in kept and loads.has_room(worker, live)]
            if not open_:
                kept.update(worker.ref for worker in asked)
                continue
            worker = loads.choose(open_, live, self._homes)
            loads.add(worker.ref, live)
            decisions.append(self._give(live, worker.ref, now))
        return decisions

    def _give(self, live: Live, ref: WorkerRef, now: float) -> Place:
        if live.num_moves:
            self._move_rate.take(now)
        self._homes.remember(live.arrival.prefix, ref)
        live.state, live.ref = advance(live.state, Event.PLACE), ref
        return Place(live.arrival.request_id, ref, live.moved)

    def _may_ask(self, worker: Worker, live: Live, now: float) -> bool:
        return self._holds(worker, live) and not (live.avoid == worker.ref and now < live.avoid_until)

    def _lose(self, worker: Worker, reason: Reason, cause: DiptychError, now: float) -> list[Decision]:
        """The worker's requests move on; it is dialled again after a time that grows."""
        back_off = self._limits.redial_min_s * 2**worker.num_failures
        worker.link, worker.redial_at = Link.DOWN, now + min(back_off, self._limits.redial_max_s)
        worker.num_failures = min(worker.num_failures + 1, 32)
        decisions: list[Decision] = []
        for live in [live for live in self._live.values() if live.ref == worker.ref]:
            decisions += self._move(live, reason, cause, now)
        return decisions

    def _move(self, live: Live, reason: Reason, cause: DiptychError, now: float) -> list[Decision]:
        """Back into the queue, unless nobody wants it or it has moved too often."""
        live.cause = live.cause or cause
        if live.state is State.CANCELLING:
            self._end(live, Event.WORKER_LOST)
            return [End(live.arrival.request_id, Cancelled("cancelled"))]
        self.counters[reason] += 1
        if live.num_moves >= self._limits.max_moves:
            self.counters[Reason.MOVED_TOO_OFTEN] += 1
            self._end(live, Event.FAIL)
            problem = f"given up after {live.num_moves + 1} decode workers; the first was lost: {live.cause}"
            return [End(live.arrival.request_id, PeerLost(problem))]
        ahead = sum(other.state is State.QUEUED and other.num_moves > 0 for other in self._live.values())
        live.state, live.ref = advance(live.state, Event.WORKER_LOST), None
        live.num_moves += 1
        live.moved = reason
        live.deadline = now + self._limits.max_wait_s + ahead / self._limits.moves_per_s
        return []

    def _run_out(self, live: Live) -> End:
        """A bounded wait is over: for a confirmation, for room, or for any worker at all."""
        request_id = live.arrival.request_id
        cancelling = live.state is State.CANCELLING
        self._end(live, Event.FAIL)
        if cancelling:
            self.counters[Reason.CANCEL_UNCONFIRMED] += 1
            return End(request_id, Cancelled("cancelled; its decode worker did not confirm in time"))
        if self.usable and not live.num_moves:
            self.counters[Reason.QUEUE_TIMEOUT] += 1
            problem = f"waited {self._limits.max_wait_s:g} s in the queue"
            return End(request_id, Overloaded(problem, self._finish_rate.time_for_s(self.num_queued)))
        self.counters[Reason.NO_WORKER] += 1
        why = f"; the first that had it was lost: {live.cause}" if live.cause else ""
        problem = f"no decode worker took it within {self._limits.max_wait_s:g} s{why}"
        return End(request_id, PeerLost(problem))

    def _end(self, live: Live, event: Event) -> None:
        live.state, live.ref = advance(live.state, event), None
        del self._live[live.arrival.request_id]

    def _forget(self, worker: Worker) -> HangUp:
        del self._workers[worker.ref]
        return HangUp(worker.ref, worker.record.rpc_address)

    def check_integrity(self) -> None:
        """Raises Internal unless every live request is where its state says, on a worker that is known."""
        for request_id, live in self._live.items():
            if (live.ref is None) != (live.state is State.QUEUED) or live.state is State.ENDED:
                raise Internal(f"{request_id} is {live.state.value} on {live.ref}")
            worker = self._workers.get(live.ref) if live.ref else None
            if live.ref and (worker is None or worker.link is not Link.UP):
                raise Internal(f"{request_id} is on {live.ref}, which is not linked")

    def assert_empty(self) -> None:
        """Raises Internal if any request is live."""
        if self._live:
            raise Internal(f"live requests are left: {sorted(self._live)}")
