"""The engine process of a prefill worker (hands): mailbox, brain, runner and channel, one turn a step.

messages ─▶ brain      borrowed chunks read ─▶ digest of our copy ─▶ brain ─▶ unpack
plan ─▶ run ─▶ commit  computed chunks ─▶ pack into the send ring ─▶ announce
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from diptych.domain.blocks import BlockPool
from diptych.domain.engine_report import EngineLoad, EngineReady, FailureInfo
from diptych.domain.errors import DigestMismatch, PeerError, TransferFailed
from diptych.domain.holding import KvPools
from diptych.domain.ids import CHUNK_TOKENS, RequestId
from diptych.domain.plan import StepPlan
from diptych.domain.ports import KvChannel, MemorySpan, Read, RemotePiece, Runner
from diptych.domain.slots import SlotRing
from diptych.engine.host import IDLE_S, host_engine, idle_timeout
from diptych.engine.mailbox import Mailbox, Post
from diptych.engine.memory import allocate
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings
from diptych.transfer.several import ChannelSet
from diptych.worker.channel import ChannelSettings, endpoint, open_kv_channels
from diptych.worker.integrity import IdleCheck
from services.prefill.admission import PrefillSettings
from services.prefill.effects import Borrow
from services.prefill.held import held_by
from services.prefill.messages import AttemptKey, ChunkAnnounced, PrefillInbox, PrefillOutbox
from services.prefill.scheduler import PrefillScheduler
from services.prefill.sources import SourceKey, Sources

BORROW_TIMEOUT_S = 2.0
PROBE_BYTES = 1 << 20
"""Zeros that decode workers read to measure the way here: about as much as a chunk of a small model."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """All that the engine process is told."""

    engine: EngineSettings
    kv: ChannelSettings
    num_send_slots: int
    num_landing_slots: int
    lease_s: float
    offer_chunks: bool


class PrefillLoop:
    """See the module. `clock` is `time.monotonic`, but for tests."""

    def __init__(
        self,
        mailbox: Post[PrefillInbox],
        runner: Runner,
        channel: KvChannel | ChannelSet,
        settings: LoopSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox = mailbox
        self._runner = runner
        self._channels = ChannelSet.of(channel)
        self._clock = clock
        slot_bytes = runner.layout.chunk_bytes()
        sending: SlotRing[SourceKey] = SlotRing(settings.num_send_slots, slot_bytes)
        landing: SlotRing[AttemptKey] = SlotRing(settings.num_landing_slots, slot_bytes)
        self._rings = (sending, landing)
        self._send_arena = allocate(sending.num_bytes)
        self._landing_arena = allocate(landing.num_bytes)
        self._channels.prepare(self._landing_arena)
        self._regions = self._channels.register(self._send_arena)
        self._probe_regions = self._channels.register(allocate(PROBE_BYTES))
        self._pools = KvPools([BlockPool(n, runner.block_tokens) for n in runner.num_blocks])
        self._sources = Sources(sending, settings.lease_s)
        self._scheduler = PrefillScheduler(
            self._pools,
            self._sources,
            landing,
            PrefillSettings(
                runner.layout.fingerprint, runner.max_context, offer_chunks=settings.offer_chunks
            ),
        )
        self.idle_check = IdleCheck(self._scheduler.check_idle, self._num_owned)
        self._borrows: list[tuple[Borrow, Read]] = []
        self._unread: list[PrefillInbox] = []
        self._announced: list[ChunkAnnounced] = []
        self._num_tokens = 0
        self._told_at = 0.0
        self._look = 0
        self._asked = False
        self._runnable = False
        self._gave_up = False
        """The last step, for the sake of a part of it."""

    def turn(self) -> None:
        timeout_s = idle_timeout(self._runnable or bool(self._unread), IDLE_S)
        inboxes = [*self._unread, *self._mailbox.receive(timeout_s)]
        self._unread = []
        for inbox in inboxes:
            self._accept(inbox)
        self._end_borrows()
        plan = self._scheduler.plan(self._clock())
        while (borrow := self._scheduler.next_borrow(self._clock())) is not None:
            self._start_borrow(borrow)
        self._runnable = bool(plan.steps)
        if plan.steps:
            self._report()  # a step takes long: what the messages brought does not wait for it
            self._run(plan)
        self._pack()
        self.idle_check.turn(not self._scheduler.num_jobs and not self._borrows, self._clock())
        self._report()

    @property
    def runnable(self) -> bool:
        """Whether the last turn ran a step: then the next one may as well."""
        return self._runnable

    @property
    def fingerprint(self) -> str:
        """Of the KV layout."""
        return self._runner.layout.fingerprint

    @property
    def num_reads(self) -> int:
        """Reads of borrowed chunks in flight."""
        return len(self._borrows)

    def assert_empty(self) -> None:
        """Raises Internal unless nothing is left of any attempt, once cached prefixes are forgotten."""
        self._pools.drop_cache()
        self._scheduler.assert_empty()

    def close(self) -> None:
        self._channels.close()

    def announce(self) -> None:
        """Says that the engine can take jobs."""
        ready = EngineReady(
            self._runner.layout.model, self._runner.layout.fingerprint, list(self._channels.kinds),
            [endpoint(region) for region in self._probe_regions], self._runner.max_context,
            self._runner.vocab_size, self._pools.total_tokens,
        )  # fmt: skip
        self._mailbox.send(PrefillOutbox(ready=ready, load=self._load()))

    def _accept(self, inbox: PrefillInbox) -> None:
        for begun in inbox.begins:
            self._scheduler.begin(begun, self._clock())
        for released in inbox.released:
            self._scheduler.released(released)
        for stopped in inbox.stops:
            self._scheduler.stop(stopped)
        if inbox.drop_cache:
            self._pools.drop_cache()
        if inbox.looks:
            self._look, self._asked = max(inbox.looks), True

    def _run(self, plan: StepPlan) -> None:
        running = {step.request_id for step in plan.steps}
        outcome = self._runner.run(plan, lambda: self._between_layers(running))
        self._scheduler.commit(plan, outcome, self._clock())
        if not outcome.aborted:
            self._num_tokens += plan.num_tokens
            self._gave_up = False

    def _between_layers(self, running: set[RequestId]) -> bool:
        """Takes in what need not wait for the step's end. Returns whether to give the step up."""
        fresh = self._mailbox.receive(0.0)
        for inbox in fresh:
            for stopped in inbox.stops:
                if stopped.key.request_id not in running:
                    self._scheduler.stop(stopped)  # once more with its inbox, and then nothing
        self._unread += fresh
        looks = [look for inbox in fresh for look in inbox.looks]
        if looks:
            self._look = max(looks)
            self._mailbox.send(PrefillOutbox(load=self._load()))
        stops = {stopped.key.request_id for inbox in self._unread for stopped in inbox.stops}
        if running <= stops:
            return True
        # The blocks of one that was stopped are free once the step is given up; what the others had of it is
        # computed anew. Not twice in a row: whoever stays must get on.
        give_up = not running.isdisjoint(stops) and not self._gave_up
        self._gave_up = self._gave_up or give_up
        return give_up

    def _pack(self) -> None:
        while (pack := self._scheduler.next_pack(self._clock())) is not None:
            num_bytes = self._runner.layout.chunk_bytes(pack.num_tokens)
            span = self._send_arena.slice(pack.slot.offset, num_bytes)
            digest = self._runner.pack(pack.tables, pack.start, pack.num_tokens, span)
            piece = RemotePiece(self._regions[0], pack.slot.offset, num_bytes)
            self._announced.append(
                ChunkAnnounced(
                    pack.key,
                    pack.index,
                    pack.start,
                    pack.num_tokens,
                    piece,
                    digest,
                    pack.chunk_hash,
                    pack.parent_hash,
                    self._regions[1:],
                )
            )
            self._scheduler.packed(pack)

    def _start_borrow(self, borrow: Borrow) -> None:
        span = self._landing_span(borrow)
        try:
            read = self._channels.read(borrow.chunk.piece, span, BORROW_TIMEOUT_S, self._mailbox.wake)
        except (PeerError, ValueError) as error:
            self._scheduler.borrow_read(borrow, TransferFailed(str(error)))
            return
        self._borrows.append((borrow, read))

    def _end_borrows(self) -> None:
        ended = [entry for entry in self._borrows if entry[1].done]
        self._borrows = [entry for entry in self._borrows if not entry[1].done]
        for borrow, read in ended:
            span = self._landing_span(borrow)
            error = read.error
            if error is None and self._runner.digest(span) != borrow.chunk.digest:
                error = DigestMismatch(f"borrowed chunk {borrow.chunk.index} is not what was lent")
            tables = self._scheduler.borrow_read(borrow, error)
            if tables is not None:
                self._runner.unpack(span, tables, borrow.chunk.index * CHUNK_TOKENS, CHUNK_TOKENS)
                self._scheduler.borrow_unpacked(borrow)

    def _landing_span(self, borrow: Borrow) -> MemorySpan:
        return self._landing_arena.slice(borrow.slot.offset, self._rings[1].slot_bytes)

    def _report(self) -> None:
        effects = self._scheduler.take_effects()
        now = self._clock()
        load = self._load() if self._asked or now - self._told_at >= IDLE_S / 2 else None
        self._asked = False
        chunks, self._announced = self._announced, []
        if load or chunks or effects.manifests or effects.over or effects.borrowing_over:
            self._mailbox.send(
                PrefillOutbox(None, chunks, effects.manifests, effects.over, effects.borrowing_over, load)
            )
            self._told_at = now if load else self._told_at

    def _load(self) -> EngineLoad:
        audit, slots = self._pools.audit()[0], self._rings[0].audit()
        queued = self._scheduler.num_queued
        held, num_held = held_by(self._scheduler, self._sources, self._rings[1], self._clock())
        load = EngineLoad(
            self._scheduler.num_jobs - queued, queued, audit.free, audit.cached, audit.owned, audit.total,
            slots.taken, slots.total, self._num_tokens, counters=dict(self._scheduler.counters),
            held=held, num_held=num_held, look=self._look,
        )  # fmt: skip
        return self.idle_check.told(load)

    def _num_owned(self) -> int:
        return sum(audit.owned for audit in self._pools.audit()) + self._rings[1].audit().taken


def _open(settings: LoopSettings, mailbox: Mailbox[PrefillInbox]) -> PrefillLoop:
    runner = open_runner(settings.engine)
    channel = open_kv_channels(settings.kv)
    loop = PrefillLoop(mailbox, runner, channel, settings)
    loop.announce()
    return loop


def _failed(failure: FailureInfo) -> PrefillOutbox:
    return PrefillOutbox(ready=EngineReady(error=failure))


if __name__ == "__main__":
    sys.exit(host_engine(LoopSettings, PrefillInbox, _open, _failed))
