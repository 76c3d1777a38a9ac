"""A decode brain under a clock of its own: steps cost what a price list says, prefill workers answer in time.

No runner, no rings, no channel: thousands of steps a second, and the same every time. What a brain promises
of its plans is checked at each of them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from diptych.domain.blocks import BlockPool
from diptych.domain.holding import KvPools
from diptych.domain.ids import CHUNK_TOKENS, Attempt, RequestId, WorkerId
from diptych.domain.lifecycle import DecodeState
from diptych.domain.plan import NOT_SAMPLED, StepOutcome, StepPlan
from diptych.domain.ports import Region, RemotePiece
from diptych.domain.sampling import SamplingParams
from diptych.domain.slots import SlotRing
from diptych.engine.toy import LAYOUT
from services.decode import messages as d
from services.decode.admission import DecodeSettings
from services.decode.effects import Effects, ReadKey
from services.decode.handoffs import Handoffs, HandoffSettings
from services.decode.request import DecodeRequest
from services.decode.scheduler import ALONE_TOKENS, DecodeScheduler

BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Prices:
    """What a step costs here, and a prompt token on a prefill worker, in seconds."""

    decode_step_s: float = 0.01
    prompt_token_s: float = 0.001
    remote_token_s: float = 0.0005


@dataclass
class Prefill:
    """One prefill worker: busy until `free_at`; its messages are due at the times that stand beside them."""

    name: str
    free_at: float = 0.0
    job: RequestId | None = None
    due: deque[tuple[float, d.ChunkReady | d.ManifestReceived]] = field(default_factory=deque)


@dataclass
class Took:
    """One step that ran."""

    num_decodes: int
    num_prompt_tokens: int
    elapsed_s: float
    names: dict[str, int]
    """Tokens by request."""


class DecodeSim:
    """`prices` may be changed at any time."""

    def __init__(
        self,
        settings: DecodeSettings,
        *,
        num_blocks: int,
        num_prefills: int = 0,
        prices: Prices | None = None,
    ) -> None:
        self.now = 0.0
        self.prices = prices or Prices()
        self.settings = settings
        self.pools = KvPools([BlockPool(num_blocks, BLOCK_TOKENS)])
        ring: SlotRing[ReadKey] = SlotRing(2, LAYOUT.chunk_bytes())
        self.handoffs = Handoffs(LAYOUT, ring, HandoffSettings())
        self.brain = DecodeScheduler(LAYOUT, self.pools, self.handoffs, settings)
        self.brain.surroundings(d.Surroundings(num_prefills, True))
        self.prefills = [Prefill(f"prefill-{i}") for i in range(num_prefills)]
        self.jobs: deque[d.JobPosted] = deque()
        self.outputs: Counter[str] = Counter()
        self.finishes: dict[str, d.FinishInfo] = {}
        self.started: list[str] = []
        """In the order in which they had their first token."""
        self.steps: list[Took] = []

    def submit(self, name: str, num_prompt: int, num_output: int, priority: int = 0) -> None:
        """No two prompts share a prefix."""
        seed = sum(name.encode()) * 7919
        tokens = [(seed + 31 * i) % 256 for i in range(num_prompt)]
        tokens[0] = seed % 256
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        message = d.Submit(RequestId(name), name, "", tokens, 0, params, priority)
        self.brain.submit(message, self.now)

    def cancel(self, name: str) -> None:
        self.brain.cancel(d.Cancel(RequestId(name)), self.now)

    def turn(self) -> bool:
        """One turn of the loop. False: nothing ran."""
        self._prefill()
        oldest = min(self._active(), key=lambda r: r.arrival, default=None)
        waiting = {r: r.costs.num_preempted for r in self.brain._seats.waiting}
        plan = self.brain.plan(self.now)
        came_before = [r for r in self._active() if oldest is not None and r.arrival < oldest.arrival]
        assert oldest is None or oldest in self._active() or came_before, "the oldest was preempted"
        self._check_admission(waiting)
        self._check_plan(plan)
        self.brain.check_integrity()
        if plan.steps:
            self._run(plan)
        self._perform(self.brain.take_effects())
        return bool(plan.steps)

    def rest(self, limit: int = 20_000) -> None:
        """Turns until every request has ended."""
        for _ in range(limit):
            if not self.turn():
                if not self.brain.live:
                    return
                self.now += 0.001
        raise AssertionError(f"never ended: {list(self.brain.live)}")

    def assert_empty(self) -> None:
        self.pools.drop_cache()
        self.brain.assert_empty()

    def _active(self) -> list[DecodeRequest]:
        return list(self.brain._seats.active)

    def _check_admission(self, before: dict[DecodeRequest, int]) -> None:
        """Nobody took a seat that one with a better place, who waits as he did, was refused."""
        seats = self.brain._seats
        reserved = seats.reserved_tokens
        most = self.settings.reserve_share * self.pools.total_tokens
        assert len(seats.awaiting) <= 1 or reserved <= most + BLOCK_TOKENS * len(seats.awaiting)
        assert seats.num_taken <= self.settings.max_batch
        if self.settings.colocated:
            taken = [r for r in before if r not in seats.waiting]
            passed = [r for r in seats.waiting if before.get(r) == r.costs.num_preempted]
            assert all(a.place < b.place for a in taken for b in passed)

    def _check_plan(self, plan: StepPlan) -> None:
        names = [step.request_id for step in plan.steps]
        assert len(names) == len(set(names))
        is_alone = self.settings.colocated and self._prompt_tokens(plan) == plan.num_tokens
        assert self._prompt_tokens(plan) <= (ALONE_TOKENS if is_alone else CHUNK_TOKENS)
        assert len(names) <= self.settings.max_batch

    def _prompt_tokens(self, plan: StepPlan) -> int:
        live = self.brain.live
        prompts = (step for step in plan.steps if live[step.request_id].state is not DecodeState.RUNNING)
        return sum(len(step.tokens) for step in prompts)

    def _run(self, plan: StepPlan) -> None:
        num_prompt = self._prompt_tokens(plan)
        num_decodes = plan.num_tokens - num_prompt
        elapsed = self.prices.prompt_token_s * num_prompt
        elapsed += self.prices.decode_step_s if num_decodes else 0.0
        self.now += elapsed
        names = {step.request_id: len(step.tokens) for step in plan.steps}
        self.steps.append(Took(num_decodes, num_prompt, elapsed, names))
        drawn = [65 if step.sample is not None else NOT_SAMPLED for step in plan.steps]
        self.brain.commit(plan, StepOutcome(drawn), elapsed, self.now)

    def _perform(self, effects: Effects) -> None:
        for out in effects.tokens:
            if out.index == 0 and out.tokens:
                self.started.append(out.request_id)
            assert out.index == self.outputs[out.request_id], "a token was lost, or came twice"
            self.outputs[out.request_id] += len(out.tokens)
            if out.finish is not None:
                assert out.request_id not in self.finishes
                self.finishes[out.request_id] = out.finish
        gone = {withdrawn.request_id for withdrawn in effects.withdrawals}
        self.jobs = deque(job for job in self.jobs if job.request_id not in gone)
        self.jobs.extend(effects.posts)
        for ended in effects.ended:
            for prefill in self.prefills:
                if prefill.job == ended.request_id:
                    prefill.due.clear()
        for start in effects.reads:
            if self.brain.read_ended(start.key, None, self.now) is not None:
                self.brain.unpacked(start.key, "sim", self.now)
        if effects.reads:
            self._perform(self.brain.take_effects())

    def _prefill(self) -> None:
        for prefill in self.prefills:
            while prefill.due and prefill.due[0][0] <= self.now:
                message = prefill.due.popleft()[1]
                if isinstance(message, d.ChunkReady):
                    self.brain.chunk_ready(message, self.now)
                else:
                    self.brain.manifest(message, self.now)
            if not prefill.due and self.jobs:
                self._begin(prefill, self.jobs.popleft())

    def _begin(self, prefill: Prefill, job: d.JobPosted) -> None:
        asked = d.BeginAsked(
            0, job.request_id, WorkerId(prefill.name), LAYOUT.fingerprint, num_attempts=job.num_attempts
        )
        self.brain.begin(asked, self.now)
        effects = self.brain.take_effects()
        (answer,) = effects.begins
        self._perform(effects)
        if answer.refusal is not None:  # it was preempted since
            return
        prefill.job = job.request_id
        at, start, end = self.now, answer.num_held, len(answer.tokens)
        index = 0
        while start < end:
            size = min(CHUNK_TOKENS, end - start)
            at += size * self.prices.remote_token_s
            piece = RemotePiece(Region("sim", prefill.name, b"", 1 << 30), 0, LAYOUT.chunk_bytes(size))
            prefill.due.append(
                (at, d.ChunkReady(job.request_id, answer.attempt, index, start, size, piece, b""))
            )
            start, index = start + size, index + 1
        manifest = d.ManifestReceived(
            job.request_id, Attempt(answer.attempt), index, end, LAYOUT.fingerprint, 65, at - self.now, 0
        )
        prefill.due.append((at, manifest))
