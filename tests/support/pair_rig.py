"""Decode and prefill workers' engine loops in one process: real brains, runner, rings and channel, no
sockets.

The rig stands in for the I/O processes and the bus: it carries messages between the loops, and `transit` may
drop, repeat or hold any of them. Time is `clock`; it moves only when a test says so.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from diptych.domain.fallbacks import fallback_named
from diptych.domain.ids import Attempt, RequestId, WorkerId
from diptych.domain.plan import StepOutcome, StepPlan
from diptych.domain.ports import KvChannel
from diptych.domain.sampling import SamplingParams
from diptych.engine.settings import EngineSettings
from diptych.engine.toy import ToyRunner
from diptych.transfer.faults import Faults
from diptych.transfer.memory import MemoryFabric
from diptych.transfer.several import ChannelSet
from diptych.worker.channel import ChannelSettings
from services.decode import loop as decode_loop
from services.decode import messages as d
from services.decode.handoffs import HandoffSettings
from services.decode.loop import DecodeLoop
from services.prefill import loop as prefill_loop
from services.prefill import messages as p
from services.prefill.loop import PrefillLoop

T = TypeVar("T")
EOS = 256
WAIT_S = 20.0
NO_CHANNEL = ChannelSettings("memory", "", "")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WatchedRunner(ToyRunner):
    """Tells of each step, and moves the clock by what it costs."""

    def __init__(self, rig: PairRig, name: str, **sizes: int) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        self._rig = rig
        self._name = name

    def run(self, plan: StepPlan, stop: Callable[[], bool] | None = None) -> StepOutcome:
        """As the toy."""
        self._rig.on_step(self._name, plan)
        num_decodes = sum(len(step.tokens) == 1 and step.start > 0 for step in plan.steps)
        self._rig.clock.now += self._rig.step_s if num_decodes else 0.0
        self._rig.clock.now += self._rig.token_s * (plan.num_tokens - num_decodes)
        return super().run(plan, stop)


class FakePost(Generic[T]):
    """A mailbox without a socket."""

    def __init__(self, woken: threading.Event) -> None:
        self.inboxes: list[T] = []
        self.outboxes: list[Any] = []
        self._woken = woken

    def receive(self, timeout_s: float) -> list[T]:
        taken, self.inboxes = self.inboxes, []
        return taken

    def send(self, outbox: object) -> None:
        self.outboxes.append(outbox)

    def wake(self) -> None:
        self._woken.set()


Transit = Callable[[object], list[object]]


class PairRig:
    """One decode loop and some prefill loops. A job goes to the first prefill loop that `takes_jobs`."""

    def __init__(
        self,
        *,
        num_prefills: int = 1,
        num_blocks: int = 256,
        prefill_blocks: int = 256,
        block_tokens: int = 4,
        threshold: int = 8,
        colocated: bool = False,
        send_slots: int = 4,
        landing_slots: int = 2,
        max_batch: int = 64,
        step_ms: int = 0,
        token_us: int = 0,
        open_channel: Callable[[Faults | None], KvChannel | ChannelSet] | None = None,
    ) -> None:
        self.clock = Clock()
        self.step_s, self.token_s = step_ms / 1e3, token_us / 1e6
        """What a step that decodes costs, and each prompt token beside."""
        self.on_step: Callable[[str, StepPlan], None] = lambda name, plan: None
        self.faults = Faults()
        self.transit: Transit = lambda message: [message]
        self.takes_jobs = [True] * num_prefills
        self.jobs: deque[d.JobPosted] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.indexes: dict[str, list[int]] = {}
        self.finishes: dict[str, list[d.FinishInfo]] = {}
        self.attempts: list[tuple[int, p.AttemptKey]] = []
        self._asked: dict[int, RequestId] = {}
        self._woken = threading.Event()
        fabric = MemoryFabric()
        open_channel = open_channel or (lambda faults: fabric.open(faults=faults))
        self._posts: list[FakePost[Any]] = [FakePost(self._woken) for _ in range(num_prefills + 1)]
        engine = EngineSettings("toy")
        self.decode = DecodeLoop(
            self._posts[0],
            WatchedRunner(self, "decode", num_blocks=num_blocks, block_tokens=block_tokens),
            open_channel(self.faults),
            decode_loop.LoopSettings(
                engine, HandoffSettings(), [EOS], b"", colocated, threshold, max_batch, 0.25, 1.0,
                NO_CHANNEL, landing_slots,
            ),
            self.clock,
        )  # fmt: skip
        self.prefills = [
            PrefillLoop(
                post,
                WatchedRunner(self, "prefill", num_blocks=prefill_blocks, block_tokens=block_tokens),
                open_channel(None),
                prefill_loop.LoopSettings(engine, NO_CHANNEL, send_slots, 2, 30.0, False),
                self.clock,
            )
            for post in self._posts[1:]
        ]
        self.tell(d.DecodeInbox(surroundings=[d.Surroundings(num_prefills, True)]))

    def tell(self, inbox: d.DecodeInbox) -> None:
        """Says something to the decode loop."""
        self._posts[0].inboxes.append(inbox)

    def tell_prefill(self, inbox: p.PrefillInbox, number: int = 0) -> None:
        self._posts[1 + number].inboxes.append(inbox)

    def submit(
        self, name: str, tokens: list[int], params: SamplingParams, num_output: int = 0, priority: int = 0
    ) -> None:
        message = d.Submit(RequestId(name), "", "", tokens, num_output, params, priority)
        self.tell(d.DecodeInbox(submits=[message]))

    def cancel(self, name: str) -> None:
        self.tell(d.DecodeInbox(cancels=[d.Cancel(RequestId(name))]))

    def step(self) -> bool:
        """One turn of every loop, and the carriage between them. False: nothing moved."""
        self.decode.turn()
        for loop in self.prefills:
            loop.turn()
        return self._carry()

    def pump(self, until: Callable[[], bool] | None = None, limit: int = 4000) -> None:
        """Steps until nothing moves any more, or `until` holds."""
        for _ in range(limit):
            if until is not None and until():
                return
            moved = self.step()
            if moved or any(post.inboxes for post in self._posts):
                continue
            if not self.decode.runnable and not any(loop.runnable for loop in self.prefills):
                if not self._reading():
                    return
                assert self._woken.wait(WAIT_S), "a read never ended"
                self._woken.clear()
        raise AssertionError("the rig never came to rest")

    def wait_for_reads(self, num_left: int = 0) -> None:
        """Waits until at most `num_left` reads of the decode loop are in flight (the held ones, say)."""
        give_up = time.monotonic() + WAIT_S
        while self.decode.num_unfinished_reads > num_left:
            assert time.monotonic() < give_up, "a read never ended"
            self._woken.wait(0.001)
            self._woken.clear()

    @property
    def has_messages(self) -> bool:
        return any(post.inboxes for post in self._posts)

    def assert_empty(self) -> None:
        self.decode.assert_empty()
        for loop in self.prefills:
            loop.assert_empty()

    def close(self) -> None:
        self.decode.close()
        for loop in self.prefills:
            loop.close()

    def _reading(self) -> bool:
        return bool(self.decode.num_reads) or any(loop.num_reads for loop in self.prefills)

    def _carry(self) -> bool:
        moved = False
        for outbox in self._drain(0):
            for message in self._in_transit(
                *outbox.tokens, *outbox.withdrawals, *outbox.posts, *outbox.begins, *outbox.chunks_done,
                *outbox.ended,
            ):  # fmt: skip
                moved = True
                self._from_decode(message)
        for number in range(len(self.prefills)):
            for outbox in self._drain(1 + number):
                for message in self._in_transit(*outbox.chunks, *outbox.manifests, *outbox.over):
                    moved = True
                    self._from_prefill(message)
        return self._claim() or moved

    def _drain(self, number: int) -> list[Any]:
        outboxes, self._posts[number].outboxes = self._posts[number].outboxes, []
        return outboxes

    def _in_transit(self, *messages: object) -> Iterator[object]:
        for message in messages:
            yield from self.transit(message)

    def _claim(self) -> bool:
        takers = [i for i, takes in enumerate(self.takes_jobs) if takes]
        if not self.jobs or not takers:
            return False
        job = self.jobs.popleft()
        fingerprint = self.prefills[0].fingerprint
        asked = d.BeginAsked(
            takers[0], job.request_id, WorkerId(f"prefill-{takers[0]}"), fingerprint,
            num_attempts=job.num_attempts,
        )  # fmt: skip
        self.tell(d.DecodeInbox(begins=[asked]))
        self._asked[takers[0]] = job.request_id
        return True

    def _from_decode(self, message: object) -> None:
        match message:
            case d.TokensOut():
                self.tokens.setdefault(message.request_id, []).extend(message.tokens)
                self.indexes.setdefault(message.request_id, []).append(message.index)
                if message.finish is not None:
                    self.finishes.setdefault(message.request_id, []).append(message.finish)
            case d.JobPosted():
                self.jobs.append(message)
            case d.JobWithdrawn():
                self.jobs = deque(job for job in self.jobs if job.request_id != message.request_id)
            case d.BeginAnswer():
                self._begun(message)
            case d.ChunkDone():
                key = p.AttemptKey(message.request_id, message.attempt)
                self._to_owner(key, p.PrefillInbox(released=[p.Released(key, message.index, "decode")]))
            case d.AttemptEnded():
                key = p.AttemptKey(message.request_id, message.attempt)
                self._to_owner(key, p.PrefillInbox(stops=[p.Stopped(key)]))

    def _begun(self, answer: d.BeginAnswer) -> None:
        if answer.refusal is not None or answer.params is None:
            return
        key = p.AttemptKey(self._asked[answer.ticket], answer.attempt)
        self.attempts.append((answer.ticket, key))
        begun = p.Begun(
            key,
            answer.tokens,
            answer.params,
            answer.banned,
            answer.num_held,
            answer.cache_root,
            0,  # type: ignore[arg-type]
        )
        self.tell_prefill(p.PrefillInbox(begins=[begun]), answer.ticket)

    def _to_owner(self, key: p.AttemptKey, inbox: p.PrefillInbox) -> None:
        for number, known in self.attempts:
            if known == key:
                self.tell_prefill(inbox, number)

    def _from_prefill(self, message: object) -> None:
        match message:
            case p.ChunkAnnounced():
                chunk = d.ChunkReady(
                    message.key.request_id, message.key.attempt, message.index, message.start,
                    message.num_tokens, message.piece, message.digest, message.others,
                )  # fmt: skip
                self.tell(d.DecodeInbox(chunks=[chunk]))
            case p.ManifestReady():
                manifest = d.ManifestReceived(
                    message.key.request_id, message.key.attempt, message.num_chunks, message.num_tokens,
                    message.fingerprint, message.first_token, message.prefill_s, message.num_cached_tokens,
                    message.num_borrowed_tokens,
                    {fallback_named(word): times for word, times in message.fallbacks.items()},
                    message.computed_at,
                )  # fmt: skip
                self.tell(d.DecodeInbox(manifests=[manifest]))
            case p.AttemptOver() if message.failure is not None:
                failure = message.failure
                failed = d.AttemptFailed(
                    message.key.request_id, message.key.attempt, failure.kind, failure.message
                )
                self.tell(d.DecodeInbox(failures=[failed]))

    def fail_attempt(self, name: str, attempt: int, kind: str = "PeerLost") -> None:
        """What the I/O process says when an attempt's stream breaks."""
        failed = d.AttemptFailed(RequestId(name), Attempt(attempt), kind, "the stream broke")
        self.tell(d.DecodeInbox(failures=[failed]))
