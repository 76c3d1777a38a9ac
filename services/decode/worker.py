"""The I/O process of a decode worker: joins sessions, hand-off streams, Redis and the engine process.

One task reads the engine's outboxes and spreads them: tokens to sessions, answers to `Begin` calls, jobs to
the bus, releases to hand-off streams. Everything that goes to the engine is collected into one inbox a turn
of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from itertools import count

from diptych.domain.engine_report import EngineLoad, EngineReady
from diptych.domain.errors import DiptychError, Draining, InvalidField, PeerLost, Stale, named_error
from diptych.domain.ids import Attempt, Cell, Epoch, RequestId, Tenant, WorkerId
from diptych.domain.records import Link, RequestRecord, Role, WorkerRecord
from diptych.engine.process import Batch, EngineProcess
from diptych.rpc.dial import Dialer
from diptych.rpc.failpoint import failpoint
from diptych.rpc.params import params_from_proto
from diptych.store.bus import PrefillBus
from diptych.store.connect import Connection
from diptych.store.membership import Membership
from diptych.store.requests import RequestProjection
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import common_pb2, decode_pb2
from diptych.worker.looks import Looks
from diptych.worker.service import checked_ready
from services.decode.attempts import AttemptStreams, Source
from services.decode.config import DecodeServiceSettings
from services.decode.deliveries import Deliveries
from services.decode.jobs import JobBoard
from services.decode.link_watch import LinkWatch
from services.decode.messages import (
    BeginAnswer,
    BeginAsked,
    Cancel,
    DecodeInbox,
    DecodeOutbox,
    JobLost,
    Submit,
    Surroundings,
    TokensOut,
)
from services.decode.outputs import Output
from services.decode.sessions import Assembly, RouterSession, SessionNumbers

LOOK_S = 0.1
RECORD_TTLS = 4
"""What the store says of a request outlives its worker's registration by so much."""
BEGIN_TIMEOUT_S = 10.0
LIVELY_S = 60.0
"""An engine that says nothing for so long hangs. Its longest steps, and the compiling before the first, are
shorter."""


class DecodeWorker:
    """See the module. Belongs to one event loop."""

    def __init__(
        self,
        settings: DecodeServiceSettings,
        worker_id: WorkerId,
        epoch: Epoch,
        engine: EngineProcess[DecodeOutbox],
        tokenizer: Tokenizer,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.ready: EngineReady = EngineReady()
        self.load = EngineLoad(0, 0, 0, 0, 0, 0, 0, 0)
        self.heard_at = 0.0
        self.looks = Looks(lambda look: self.inbox.looks.append(look))
        self.streams = AttemptStreams()
        self.link_watch = LinkWatch(settings.link_bound, self._prefill_workers, lambda: self.ready.channels)
        self._settings = settings
        self._engine = engine
        self._tokenizer = tokenizer
        self._batch: Batch[DecodeInbox] = Batch(engine, DecodeInbox)
        self.deliveries = Deliveries(settings.detach_grace_s, self.cancel, time.monotonic)
        self._sessions: set[RouterSession] = set()
        self._numbers = SessionNumbers()
        self._begins: dict[int, tuple[RequestId, asyncio.Future[BeginAnswer]]] = {}
        self._tickets = count(1)
        self._draining = False
        self._idle = asyncio.Event()
        self._board: JobBoard | None = None
        self._membership: Membership | None = None

    @property
    def inbox(self) -> DecodeInbox:
        """What goes to the engine next."""
        return self._batch.open()

    @property
    def num_live(self) -> int:
        return self.deliveries.num_running

    @property
    def is_lively(self) -> bool:
        """Whether the engine process may be expected to go on: a stopped one must look stopped."""
        return not self._engine.is_stopped and time.monotonic() - self.heard_at < LIVELY_S

    async def start(self) -> None:
        """Starts the engine and waits until it is ready. Raises the error that kept it from starting."""
        await self._engine.start()
        first = await self._engine.receive()
        self.ready = checked_ready(first.ready)
        self.load = first.load or self.load
        self.heard_at = time.monotonic()

    def join(self, redis: Connection, membership: Membership, dialer: Dialer) -> None:
        """The store has been reached."""
        shard, cell = self._settings.shard, Cell(self._settings.cell)
        self._membership = membership
        self._board = JobBoard(
            PrefillBus(redis, shard, cell),
            RequestProjection(redis, shard, running_ttl_s=RECORD_TTLS * self._settings.ttl_s),
            self.worker_id,
            self.epoch,
            lambda request_id: self.inbox.unposted.append(request_id),
            lambda request_id, reason: self.inbox.lost_jobs.append(JobLost(request_id, reason)),
        )  # fmt: skip

    async def run(self) -> None:
        """Spreads the engine's outboxes until it ends. Raises PeerLost then."""
        looking = asyncio.create_task(self._look_around(), name="surroundings")
        try:
            while True:
                outbox = await self._engine.receive()
                self.heard_at = time.monotonic()
                self._spread(outbox)
        finally:
            looking.cancel()
            await asyncio.wait({looking})

    async def stop(self) -> None:
        """Ends store writes and the engine."""
        if self._board is not None:
            await self._board.close()
        await self._engine.stop()

    async def check_prefill(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Raises Stale unless this very start of the prefill worker is registered."""
        membership = self._membership
        if membership is not None and membership.peer(worker_id, epoch) is None:
            await membership.refresh()  # it may have come after our last look
        if membership is None or membership.peer(worker_id, epoch) is None:
            raise Stale(f"prefill worker {worker_id}@{epoch} is not registered")

    def sources_of(self, worker_id: WorkerId, epoch: Epoch) -> frozenset[Source]:
        """Where this start of a prefill worker is registered to be read: nothing else of it is."""
        peer = self._membership.peer(worker_id, epoch) if self._membership else None
        return frozenset((c.kind, c.address) for c in peer.channels) if peer else frozenset()

    def open_session(self, router_id: str, router_epoch: int, number: int) -> RouterSession:
        """Raises Stale for a session that its router has ended before."""
        session = RouterSession(router_id, router_epoch)
        self._numbers.take(session.router, number)
        for before in [other for other in self._sessions if other.router == session.router]:
            before.close()
            self.close_session(before)
        self.deliveries.give_up(session.router)
        self._sessions.add(session)
        if self._draining:
            session.close()
        return session

    def close_session(self, session: RouterSession) -> None:
        """A router is gone; its clients may come back through another."""
        self._sessions.discard(session)
        self.deliveries.detach(session)

    def drain(self) -> None:
        """From now on takes no new request, and ends each session with its last one."""
        if not self.num_live:
            self._idle.set()
        self._draining = True
        for session in self._sessions:
            if not session.requests:
                session.close()

    async def drained(self) -> None:
        """Returns when no request is left and every session has closed."""
        await self._idle.wait()

    def submit(self, session: RouterSession, whole: Assembly) -> None:
        """Gives a request to the engine, or refuses it with a last delta."""
        try:
            self._submit(session, whole)
        except DiptychError as error:
            session.send([refusal(RequestId(whole.submit.request_id), error)])

    def cancel(self, request_id: RequestId) -> None:
        self.inbox.cancels.append(Cancel(request_id))

    def abort_unsubmitted(self, session: RouterSession, request_id: RequestId) -> None:
        """Ends a request that was cancelled before all of its prompt had come."""
        finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_ABORT)
        session.send([decode_pb2.Delta(request_id=request_id, finish=finish)])

    async def begin(self, request: decode_pb2.BeginRequest) -> BeginAnswer:
        """Asks the engine about a prefill worker's `Begin`. Raises its refusal."""
        ticket = next(self._tickets)
        answer: asyncio.Future[BeginAnswer] = asyncio.get_running_loop().create_future()
        peer = WorkerId(request.prefill_worker), Epoch(request.prefill_epoch)
        self._begins[ticket] = RequestId(request.request_id), answer
        try:
            self.inbox.begins.append(
                BeginAsked(
                    ticket,
                    RequestId(request.request_id),
                    WorkerId(request.prefill_worker),
                    request.fingerprint,
                    self.link_watch.refuses(peer),
                    request.num_attempts,
                    self.link_watch.refused_kinds(peer),
                )
            )
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                begun = await answer
        except TimeoutError:
            raise PeerLost("the engine did not answer in time") from None
        finally:
            del self._begins[ticket]
        if begun.refusal is not None:
            raise named_error(begun.refusal.kind, begun.refusal.message)
        if self._board is not None:
            self._board.begun(RequestId(request.request_id))
        return begun

    async def _look_around(self) -> None:
        """Tells the engine whether there is anybody to prefill, and a bus to ask them on."""
        told = None
        while self._membership is not None:
            self.deliveries.expire()
            if self._board is not None:
                self._board.look({request_id for request_id, _ in self._begins.values()})
                self._board.renew()
            usable, known = self.num_prefill_workers, len(self._prefill_workers())
            now = Surroundings(usable, self._membership.available, known - usable)
            if now != told:
                told = now
                self.inbox.surroundings.append(now)
            if (probe := self.link_watch.ask()) is not None:
                self.inbox.probes.append(probe)
            await asyncio.sleep(LOOK_S)

    @property
    def num_prefill_workers(self) -> int:
        """Those that a prompt could be handed to."""
        refuses = self.link_watch.refuses
        return sum(not refuses((peer.worker_id, peer.epoch)) for peer in self._prefill_workers())

    @property
    def links(self) -> tuple[Link, ...]:
        """To the prefill workers; those that the registry is told of."""
        return self.link_watch.told()

    def _prefill_workers(self) -> list[WorkerRecord]:
        """Those of our cell and layout, however far away."""
        peers = self._membership.peers(Role.PREFILL) if self._membership else ()
        cell, fingerprint = self._settings.cell, self.ready.fingerprint
        return [peer for peer in peers if peer.cell == cell and peer.fingerprint == fingerprint]

    def _submit(self, session: RouterSession, whole: Assembly) -> None:
        failpoint("decode.submitted")
        submit = whole.submit
        request_id = RequestId(submit.request_id)
        if self._draining:
            raise Draining("this worker is leaving")
        if self.deliveries.must_wait(session, whole):
            return
        vocab_size = self.ready.vocab_size
        params = params_from_proto(submit.params, vocab_size)
        if len(whole.tokens) != submit.num_tokens or submit.num_output >= max(1, submit.num_tokens):
            raise InvalidField("num_tokens", f"says {submit.num_tokens}, {len(whole.tokens)} came")
        if max(whole.tokens) >= vocab_size:
            raise InvalidField("tokens", f"{max(whole.tokens)} is past the vocabulary of {vocab_size}")
        given = whole.tokens[len(whole.tokens) - submit.num_output :]
        stop = Output.stop_in(self._tokenizer, params, given)
        if stop:
            session.send([ended_by_stop(request_id, len(given), stop)])
            return
        self.deliveries.add(session, whole, Output(self._tokenizer, params, given))
        self.inbox.submits.append(
            Submit(
                request_id, submit.tenant, submit.cache_salt, whole.tokens, submit.num_output, params,
                submit.priority,
            )
        )  # fmt: skip
        if self._board is not None:
            self._board.admitted(self._record(submit, len(whole.tokens) - submit.num_output))

    def _record(self, submit: decode_pb2.Submit, num_prompt_tokens: int) -> RequestRecord:
        return RequestRecord(
            RequestId(submit.request_id), Tenant(submit.tenant), "admitted", self.worker_id, self.epoch,
            Attempt(0), submit.placement or 1, 1, num_prompt_tokens,
        )  # fmt: skip

    def _spread(self, outbox: DecodeOutbox) -> None:
        if outbox.load is not None:
            self.load = outbox.load
            self.looks.answered(self.load.look)
        for measured in outbox.probed:
            self.link_watch.measured(measured)
        if outbox.tokens:
            failpoint("decode.tokens")
        self._spread_tokens(outbox.tokens)
        for begun in outbox.begins:
            waiting = self._begins.get(begun.ticket)
            if waiting is not None and not waiting[1].done():
                if begun.refusal is None:
                    self.streams.begun((waiting[0], begun.attempt))
                waiting[1].set_result(begun)
        for done in outbox.chunks_done:
            failpoint("decode.landed")
            self.streams.chunk_done(done)
        for ended in outbox.ended:
            self.streams.attempt_ended(ended)
        if self._board is not None:
            # In this order: a request that lost its job may have posted the next one in the same turn.
            for withdrawn in outbox.withdrawals:
                self._board.withdraw(withdrawn.request_id)
            for posted in outbox.posts:
                self._board.post(posted)

    def _spread_tokens(self, tokens: list[TokensOut]) -> None:
        by_session: dict[RouterSession, list[decode_pb2.Delta]] = defaultdict(list)
        come_back: list[tuple[RouterSession, Assembly]] = []
        for out in tokens:
            delivery = self.deliveries.get(out.request_id)
            if delivery is None:
                self._end_projection(out)
                continue
            output = delivery.output
            was_stopped = output.stopped
            delta = output.delta(out, self.worker_id)
            if delta is not None and delivery.session is not None:
                by_session[delivery.session].append(delta)
            if out.finish is not None:
                failpoint("decode.last_word")
                self._end_projection(out)
                come_back.extend(self.deliveries.ended(delivery))
            elif output.stopped and not was_stopped:
                self.cancel(out.request_id)
        for session, deltas in by_session.items():
            session.send(deltas)
            if self._draining and not session.requests:
                session.close()
        for session, whole in come_back:
            self.submit(session, whole)
        if self._draining and not self.num_live:
            self._idle.set()

    def _end_projection(self, out: TokensOut) -> None:
        if self._board is not None and out.finish is not None:
            num_output = out.index + len(out.tokens)
            self._board.ended(out.request_id, "ended", num_output, out.finish.reason)


def ended_by_stop(request_id: RequestId, index: int, stop: str) -> decode_pb2.Delta:
    """The only delta of a resumed request whose text had ended before it came here."""
    finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_STOP, stop=stop)
    return decode_pb2.Delta(request_id=request_id, index=index, finish=finish)


def refusal(request_id: RequestId, error: DiptychError) -> decode_pb2.Delta:
    """The only delta of a request that was not taken."""
    failure = common_pb2.Failure(kind=type(error).__name__, message=str(error), retry=error.retry)
    finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_ERROR, failure=failure)
    return decode_pb2.Delta(request_id=request_id, finish=finish)
