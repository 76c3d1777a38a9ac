"""The engine process of a decode worker (hands): mailbox, brain, runner and channel, one turn a step.

messages ─▶ brain      ended reads ─▶ digest of our copy ─▶ brain ─▶ unpack
plan ─▶ run ─▶ commit  effects ─▶ new reads, and one batch to the I/O process
idle ─▶ links are measured when asked, and the books are checked
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
from diptych.domain.plan import StepPlan
from diptych.domain.ports import KvChannel, MemorySpan, Read, Runner
from diptych.domain.slots import SlotRing
from diptych.engine.host import IDLE_S, host_engine, idle_timeout
from diptych.engine.mailbox import Mailbox, Post
from diptych.engine.memory import allocate
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings
from diptych.transfer.several import ChannelSet
from diptych.worker.channel import ChannelSettings, open_kv_channels
from diptych.worker.integrity import IdleCheck
from services.decode.admission import DecodeSettings
from services.decode.channels import ChannelChoice
from services.decode.effects import Effects, ReadKey, StartRead
from services.decode.handoffs import Handoffs, HandoffSettings
from services.decode.held import held_by
from services.decode.messages import DecodeInbox, DecodeOutbox, ProbeDone
from services.decode.probes import Probes
from services.decode.scheduler import DecodeScheduler


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """All that the engine process is told."""

    engine: EngineSettings
    handoff: HandoffSettings
    eos_ids: list[int]
    tokenizer_digest: bytes
    colocated: bool
    threshold_tokens: int
    max_batch: int
    itl_slack: float
    pool_share: float
    kv: ChannelSettings
    num_landing_slots: int


class DecodeLoop:
    """See the module. `clock` is `time.monotonic`, but for tests."""

    def __init__(
        self,
        mailbox: Post[DecodeInbox],
        runner: Runner,
        channel: KvChannel | ChannelSet,
        settings: LoopSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox = mailbox
        self._runner = runner
        self._channels = ChannelSet.of(channel)
        self._clock = clock
        self._pools = KvPools([BlockPool(n, runner.block_tokens) for n in runner.num_blocks])
        slot_bytes = runner.layout.chunk_bytes()
        self._ring: SlotRing[ReadKey] = SlotRing(settings.num_landing_slots, slot_bytes)
        self._arena: MemorySpan = allocate(self._ring.num_bytes)
        self._channels.prepare(self._arena)
        choice = ChannelChoice(self._channels.kinds)
        self._handoffs = Handoffs(runner.layout, self._ring, settings.handoff, choice)
        self._scheduler = DecodeScheduler(
            runner.layout, self._pools, self._handoffs, _decode_settings(settings, runner)
        )
        self._reads: dict[ReadKey, tuple[StartRead, Read]] = {}
        self._probes = Probes(self._channels, mailbox.wake)
        self._probed: list[ProbeDone] = []
        self.idle_check = IdleCheck(self._scheduler.assert_empty, self._num_owned)
        self._num_tokens = 0
        self._told_at = 0.0
        self._look = 0
        self._asked = False
        self._runnable = False

    def turn(self) -> None:
        timeout_s = idle_timeout(self._runnable, self._scheduler.next_deadline() - self._clock())
        for inbox in self._mailbox.receive(timeout_s):
            self._accept(inbox)
        self._end_reads()
        plan = self._scheduler.plan(self._clock())
        self._runnable = bool(plan.steps)
        if plan.steps:
            # A step takes long: what the messages brought, an abort or a read to start, does not wait for it.
            self._perform(self._scheduler.take_effects())
            self._run(plan)
        self._probed = self._probes.turn(busy=not self.is_idle)
        self.idle_check.turn(self.is_idle, self._clock())
        self._perform(self._scheduler.take_effects())

    @property
    def is_idle(self) -> bool:
        """No request is live, and no read of a former one is in flight."""
        return not self._scheduler.live and not self._reads

    @property
    def runnable(self) -> bool:
        """Whether the last turn ran a step: then the next one may as well."""
        return self._runnable

    @property
    def num_reads(self) -> int:
        """Reads in flight."""
        return len(self._reads)

    @property
    def num_unfinished_reads(self) -> int:
        """Those of them whose bytes may still change."""
        return sum(not read.done for _, read in self._reads.values())

    def check_integrity(self) -> None:
        """Raises Internal unless the live requests own exactly the blocks that are owned."""
        self._scheduler.check_integrity()

    def assert_empty(self) -> None:
        """Raises Internal unless nothing is left of any request, once cached prefixes are forgotten."""
        self._pools.drop_cache()
        self._scheduler.assert_empty()

    def close(self) -> None:
        self._channels.close()

    def announce(self) -> None:
        """Says that the engine can take requests."""
        ready = EngineReady(
            self._runner.layout.model, self._runner.layout.fingerprint, list(self._channels.kinds), [],
            self._runner.max_context, self._runner.vocab_size, self._pools.total_tokens,
        )  # fmt: skip
        self._mailbox.send(DecodeOutbox(ready=ready, load=self.load()))

    def _accept(self, inbox: DecodeInbox) -> None:
        now = self._clock()
        scheduler = self._scheduler
        for surroundings in inbox.surroundings:
            scheduler.surroundings(surroundings)
        for submit in inbox.submits:
            scheduler.submit(submit, now)
        for begin in inbox.begins:
            scheduler.begin(begin, now)
        self._accept_of_handoffs(inbox, now)
        for cancel in inbox.cancels:
            scheduler.cancel(cancel, now)
        for probe in inbox.probes:
            self._probes.ask(probe)
        if inbox.drop_cache:
            self._pools.drop_cache()
        if inbox.looks:
            self._look, self._asked = max(inbox.looks), True

    def _accept_of_handoffs(self, inbox: DecodeInbox, now: float) -> None:
        scheduler = self._scheduler
        for chunk in inbox.chunks:
            scheduler.chunk_ready(chunk, now)
        for manifest in inbox.manifests:
            scheduler.manifest(manifest, now)
        for alive in inbox.alive:
            scheduler.attempt_alive(alive.request_id, alive.attempt, now)
        for failed in inbox.failures:
            scheduler.attempt_failed(failed.request_id, failed.attempt, failed.kind, failed.message)
        for request_id in inbox.unposted:
            scheduler.job_unposted(request_id)
        for lost in inbox.lost_jobs:
            scheduler.job_lost(lost.request_id, lost.reason)

    def _run(self, plan: StepPlan) -> None:
        started = self._clock()
        outcome = self._runner.run(plan)
        ended = self._clock()
        self._scheduler.commit(plan, outcome, ended - started, ended)

    def _end_reads(self) -> None:
        for key in [key for key, (_, read) in self._reads.items() if read.done]:
            start, read = self._reads.pop(key)
            span = self._span(start)
            error = read.error
            if error is None and self._runner.digest(span) != start.digest:
                error = DigestMismatch(f"chunk {key.index} of {key.request_id} is not what was announced")
            self._read_ended(start, span, error)

    def _read_ended(self, start: StartRead, span: MemorySpan, error: PeerError | None) -> None:
        unpack = self._scheduler.read_ended(start.key, error, self._clock())
        if unpack is not None:
            self._runner.unpack(span, unpack.tables, unpack.start, unpack.num_tokens)
            self._scheduler.unpacked(start.key, start.piece.region.kind, self._clock())

    def _perform(self, effects: Effects) -> None:
        for start in effects.reads:
            self._start_read(start)
        for key in effects.stop_reads:
            if key in self._reads:
                self._reads[key][1].cancel()
        self._num_tokens += sum(len(out.tokens) for out in effects.tokens)
        now = self._clock()
        load = self.load() if self._asked or now - self._told_at >= IDLE_S / 2 else None
        self._asked = False
        outbox = DecodeOutbox(
            None, effects.tokens, effects.begins, effects.posts, effects.withdrawals,
            effects.chunks_done, effects.ended, load, self._probed,
        )  # fmt: skip
        if load or any((outbox.tokens, outbox.begins, outbox.posts, outbox.withdrawals,
                        outbox.chunks_done, outbox.ended, outbox.probed)):  # fmt: skip
            self._mailbox.send(outbox)
            self._told_at = now if load else self._told_at
            self._probed = []

    def _start_read(self, start: StartRead) -> None:
        try:
            read = self._channels.read(start.piece, self._span(start), start.timeout_s, self._mailbox.wake)
        except (PeerError, ValueError) as error:
            self._read_ended(start, self._span(start), TransferFailed(str(error)))
            self._mailbox.wake()
            return
        self._reads[start.key] = (start, read)

    def _span(self, start: StartRead) -> MemorySpan:
        return self._arena.slice(start.slot.offset, start.piece.num_bytes)

    def load(self) -> EngineLoad:
        """How this worker is, derived from its live set."""
        audit, slots = self._pools.audit()[0], self._ring.audit()
        scheduler = self._scheduler
        held, num_held = held_by(scheduler, self._handoffs, self._ring, self._clock())
        load = EngineLoad(
            scheduler.num_active, scheduler.num_waiting, audit.free, audit.cached, audit.owned, audit.total,
            slots.taken, slots.total, self._num_tokens, scheduler.pace.decode_step_s, 0.0,
            dict(scheduler.counters + self._handoffs.counters), held, num_held, look=self._look,
        )  # fmt: skip
        return self.idle_check.told(load)

    def _num_owned(self) -> int:
        return sum(audit.owned for audit in self._pools.audit()) + self._ring.audit().taken


def _decode_settings(settings: LoopSettings, runner: Runner) -> DecodeSettings:
    return DecodeSettings(
        max_context=runner.max_context,
        eos_ids=frozenset(settings.eos_ids),
        tokenizer_digest=settings.tokenizer_digest,
        colocated=settings.colocated,
        threshold_tokens=settings.threshold_tokens,
        max_batch=settings.max_batch,
        itl_slack=settings.itl_slack,
        pool_share=settings.pool_share,
    )


def _open(settings: LoopSettings, mailbox: Mailbox[DecodeInbox]) -> DecodeLoop:
    runner = open_runner(settings.engine)
    loop = DecodeLoop(mailbox, runner, open_kv_channels(settings.kv), settings)
    loop.announce()
    return loop


def _failed(failure: FailureInfo) -> DecodeOutbox:
    return DecodeOutbox(ready=EngineReady(error=failure))


if __name__ == "__main__":
    sys.exit(host_engine(LoopSettings, DecodeInbox, _open, _failed))
