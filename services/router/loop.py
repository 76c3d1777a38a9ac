"""The router's hands: they tell the policy what happened, and carry out what it decides.

Everything runs on one event loop and each event is handled in one go, so that the policy's live set, the
table of live requests here and what was queued on the sessions always agree. A decision may bring about a
further event (a cancel for a request that was never sent is confirmed at once); it is handled in the same go.

Who holds a request: the policy and `live` from its admission until its worker's last word, or until waiting
for that ran out; its client's call, `calls`, from its admission until the client has taken the last piece.
The two end independently; when both have ended, the worker hears that it need keep nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, Final

from diptych.domain.errors import DiptychError, Internal
from diptych.domain.ids import RequestId
from diptych.domain.records import WorkerRecord
from diptych.rpc.dial import Dialer
from diptych.rpc.failpoint import failpoint
from diptych.telemetry.recorder import Recorder
from diptych.v1 import common_pb2, decode_pb2
from services.router import wire
from services.router.attach import Attachments
from services.router.decisions import Abort, Arrival, Decision, Dial, End, HangUp, Place, Reason, WorkerRef
from services.router.policy import RouterPolicy
from services.router.requests import CheckedRequest, LiveRequest, Recent
from services.router.session import Deltas, Session
from services.router.telemetry import record_end

log = logging.getLogger(__name__)

TICK_S: Final = 0.05

HANDED_BACK: Final = frozenset({"Draining", "Overloaded", "Stale"})
"""Failures with which a worker says that it, and not the request, is the trouble: another may serve it."""


class RouterLoop:
    """Belongs to one event loop. `peers` tells the workers last known alive."""

    def __init__(
        self,
        policy: RouterPolicy,
        router: WorkerRef,
        dialer: Dialer,
        peers: Callable[[], Sequence[WorkerRecord]],
        eos_ids: frozenset[int],
        recorder: Recorder,
        *,
        heartbeat_s: float,
        silent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.live: dict[RequestId, LiveRequest] = {}
        self.calls: dict[RequestId, LiveRequest] = {}
        self.attachments = Attachments(self)
        self.recent = Recent()
        self.num_finished = 0
        self._router = router
        self._dialer = dialer
        self._peers = peers
        self._eos_ids = eos_ids
        self._recorder = recorder
        self._heartbeat_s = heartbeat_s
        self._silent_s = silent_s
        self._clock = clock
        self._known: Sequence[WorkerRecord] | None = None
        self._sessions: dict[WorkerRef, Session] = {}
        self._numbers = count(1)
        self._closing: set[asyncio.Task[None]] = set()
        self._less = asyncio.Event()
        """Set when a request has left `live`."""

    async def run(self) -> None:
        """Looks at the registry's view and at the clock, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(TICK_S)

    def look(self) -> None:
        """One turn of `run`."""
        now, peers = self._clock(), self._peers()
        if peers != self._known:
            self._known = peers
            self._carry_out(self.policy.set_workers(peers, now))
            self.attachments.look()
        self._carry_out(self.policy.tick(now))
        if not self.live:
            self.policy.check_integrity()

    def admit(self, checked: CheckedRequest) -> LiveRequest:
        """Takes a request in. Raises Overloaded or TooLarge, and then has taken in nothing."""
        now = self._clock()
        request_id = RequestId(secrets.token_hex(12))
        arrival = Arrival(
            request_id, len(checked.tokens), checked.params.max_tokens, checked.priority, checked.prefix
        )
        live = self.live[request_id] = LiveRequest(request_id, checked, now)
        try:
            decisions = self.policy.arrive(arrival, now)
        except DiptychError:
            del self.live[request_id]
            raise
        self.calls[request_id] = live
        self._carry_out(decisions)
        return live

    def adopt(self, live: LiveRequest, ref: WorkerRef) -> None:
        """Takes in a request that runs on `ref`, from another router or from another call of ours."""
        checked = live.checked
        arrival = Arrival(live.request_id, len(checked.tokens), checked.params.max_tokens, checked.priority)
        self.policy.adopt(arrival, ref, self._clock())
        self._supersede(live.request_id)
        live.ref = ref
        live.fallbacks[Reason.ROUTER_LOST] += 1
        self.live[live.request_id] = self.calls[live.request_id] = live

    def hang_up(self, live: LiveRequest) -> None:
        """A client's call is over, in whatever way: a request that has not ended is cancelled everywhere.
        Nothing happens where another call has the request since."""
        if self.calls.get(live.request_id) is not live:
            return
        del self.calls[live.request_id]
        session = self._sessions.get(live.ref) if live.ref else None
        if self.attachments.is_coming(live.request_id):
            return  # another call has come for it, and will get it or hang up itself
        if live.request_id in self.live:
            self.cancel(live.request_id, Reason.CLIENT_GONE)
        elif session is not None:
            session.acknowledge(live.request_id)

    def session_with(self, ref: WorkerRef) -> Session | None:
        """The open session with that start of a worker."""
        return self._sessions.get(ref) if self.policy.is_linked(ref) else None

    def cancel(self, request_id: RequestId, reason: Reason) -> None:
        """Ends a request everywhere; nothing happens to one that is not live, or cancelled already."""
        self._carry_out(self.policy.cancel(request_id, reason, self._clock()))
        failpoint("router.cancel")

    def attachment_failed(self, request_id: RequestId) -> None:
        """See attach.Owner. The call that had the request may have gone meanwhile."""
        if request_id not in self.calls:
            self.cancel(request_id, Reason.CLIENT_GONE)

    def attachment_dropped(self, request_id: RequestId, session: Session) -> None:
        """See attach.Owner. The newest call has hung up: that is the end for older ones too."""
        self._supersede(request_id)
        if request_id in self.live:
            self.cancel(request_id, Reason.CLIENT_GONE)
        else:
            session.cancel(request_id)

    async def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is live, at most `timeout_s`. Whether that came about. `run` must run
        meanwhile."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.live:
                    self._less.clear()
                    await self._less.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends every session and waits until nothing of ours runs."""
        for ref in list(self._sessions):
            session = self._sessions.pop(ref)
            self._in_background(self._hang_up(session, session.address))
        while self._closing:
            await asyncio.wait(self._closing)

    def assert_empty(self) -> None:
        """Raises Internal if a request is live here or in the policy, or a session or a task is left."""
        self.policy.assert_empty()
        self.attachments.assert_empty()
        if self.live or self.calls or self._sessions or self._closing:
            held = sorted({*self.live, *self.calls})
            raise Internal(f"left: {held}, {sorted(map(str, self._sessions))}, {self._closing}")

    # SessionListener

    def session_up(self, session: Session) -> None:
        """See SessionListener."""
        if self._is_current(session):
            self._carry_out(self.policy.link_up(session.ref, self._clock()))
            self.attachments.look()

    def session_answer(self, session: Session, answer: decode_pb2.SessionResponse) -> None:
        """See SessionListener."""
        if self._is_current(session):
            self.attachments.answer(session.ref, answer)

    def session_lost(self, session: Session, reason: Reason, cause: DiptychError) -> None:
        """See SessionListener."""
        if self._is_current(session):
            # A worker that cannot be reached is dialled again and again: that is no news each time.
            level = logging.WARNING if session.was_up else logging.INFO
            log.log(level, "no session with decode worker %s (%s): %s", session.ref, reason.value, cause)
            del self._sessions[session.ref]
            self.attachments.lost(session.ref, cause)
            self._carry_out(self.policy.link_lost(session.ref, reason, cause, self._clock()))

    def session_deltas(self, session: Session, deltas: Deltas) -> None:
        """See SessionListener. Deltas for requests that are not this worker's, or no more, are passed
        over."""
        failpoint("router.deltas")
        now = self._clock()
        for delta in deltas if self._is_current(session) else ():
            live = self.live.get(RequestId(delta.request_id))
            if live is None or self.policy.worker_of(live.request_id) != session.ref:
                continue
            try:
                live.push(delta, now)
            except Internal as error:
                log.error("%s: %s", live.request_id, error)
                self._fail(live, error)
                self._carry_out(self.policy.cancel(live.request_id, Reason.BROKEN_STREAM, now))
            if delta.HasField("finish"):
                self._last_word(live, session.ref, delta.finish, now)

    def _last_word(self, live: LiveRequest, ref: WorkerRef, finish: common_pb2.Finish, now: float) -> None:
        failpoint("router.last_word")
        failed = finish.reason == common_pb2.FINISH_REASON_ERROR
        if failed and finish.failure.kind in HANDED_BACK and not live.ended:
            cause = wire.error_of(finish.failure)
            self._carry_out(self.policy.hand_back(live.request_id, ref, cause, now))
            return
        self._end(live, finish, now)
        self._settle(live.request_id, now)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        todo = deque(decisions)
        while todo:
            match todo.popleft():
                case Dial(ref, record):
                    self._dial(ref, record)
                case HangUp(ref, address):
                    self._in_background(self._hang_up(self._sessions.pop(ref, None), address))
                case Place(request_id, ref, moved):
                    self._place(self.live[request_id], ref, moved)
                case Abort(request_id, ref):
                    if not self._sessions[ref].cancel(request_id):
                        live = self.live[request_id]
                        self._end(live, wire.finish_for(common_pb2.FINISH_REASON_ABORT), self._clock())
                        self._settle(request_id, self._clock())
                case End(request_id, error):
                    self._fail(self._forget(request_id), error)

    def _dial(self, ref: WorkerRef, record: WorkerRecord) -> None:
        session = self._sessions[ref] = Session(
            ref,
            record.rpc_address,
            self._dialer,
            router=self._router,
            number=next(self._numbers),
            listener=self,
            heartbeat_s=self._heartbeat_s,
            silent_s=self._silent_s,
        )
        session.start()

    def _place(self, live: LiveRequest, ref: WorkerRef, moved: Reason | None) -> None:
        try:
            self._submit(live, ref, moved)
        except DiptychError as error:  # one request that cannot be sent is no reason to lose the others
            log.error("%s: not submitted: %s", live.request_id, error)
            self._fail(live, error)
            self._settle(live.request_id, self._clock())

    def _submit(self, live: LiveRequest, ref: WorkerRef, moved: Reason | None) -> None:
        failpoint("router.placed")
        live.ref = ref
        if moved is not None:
            live.fallbacks[moved] += 1
            reason = live.ended_by(self._eos_ids)
            if reason is not None:
                # The worker was lost between its last token and its last word: nothing is left to compute.
                self._end(live, wire.finish_for(reason), self._clock())
                self._settle(live.request_id, self._clock())
                return
        self._sessions[ref].submit(wire.submit_message(live), [*live.checked.tokens, *live.output])

    def _settle(self, request_id: RequestId, now: float) -> None:
        """Its worker holds nothing of it any more."""
        self._forget(request_id)
        self._carry_out(self.policy.finish(request_id, now))

    def _forget(self, request_id: RequestId) -> LiveRequest:
        self._less.set()
        return self.live.pop(request_id)

    def _end(self, live: LiveRequest, finish: common_pb2.Finish, now: float) -> None:
        if live.end(wire.finish_message(live, finish), now):
            self.num_finished += 1
            if not live.is_adopted:  # its times began elsewhere
                self.recent.add(live.times, len(live.output))
                record_end(self._recorder, live, finish)
            reason = common_pb2.FinishReason.Name(finish.reason)
            log.info("ended: %s", reason, extra={"request_id": live.request_id, "label": live.checked.label})

    def _supersede(self, request_id: RequestId) -> None:
        """The call that has the request, if one does, hears of its end."""
        before = self.calls.get(request_id)
        if before is not None:
            self._end(before, wire.superseded(), self._clock())

    def _fail(self, live: LiveRequest, error: DiptychError) -> None:
        live.error = live.error or error
        self._end(live, wire.finish_for_error(error), self._clock())

    async def _hang_up(self, session: Session | None, address: str) -> None:
        if session is not None:
            await session.close()
        # A worker that was started anew at the same place has a session on the same channel.
        if all(other.address != address for other in self._sessions.values()):
            await self._dialer.forget(address)

    def _is_current(self, session: Session) -> bool:
        return self._sessions.get(session.ref) is session

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
