"""The decode brain: who runs in the next step, whose KV comes from where, who gives up blocks for whom.

    events (submit, cancel, begin, chunk, manifest, read ended, …) and `now` in
    plan(now) → the runner → commit(plan, outcome, now)        effects out

A request is admitted (`admission`) when the pool can hold all of its tokens and one more; admission takes the
blocks, so that everything after it can only be waiting for *time*, never for memory that someone else who
waits is holding. A running request that needs a block takes it from the last in rank (`seats`), which then
starts over from its tokens. A step carries one token of each request that runs, and as many prompt tokens as
`pace` allows, by turns (`order`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter

from diptych.domain.errors import Internal, PeerError
from diptych.domain.fallbacks import DISAGGREGATED, KV_BYTES, LOCAL, Fallback, PathReason
from diptych.domain.hashing import cache_root
from diptych.domain.holding import KvPools
from diptych.domain.ids import CHUNK_TOKENS, Attempt, RequestId
from diptych.domain.layout import KvLayout
from diptych.domain.lifecycle import DecodeEvent, DecodeState
from diptych.domain.order import PromptTurns
from diptych.domain.plan import NOT_SAMPLED, StepOutcome, StepPlan
from services.decode import admission
from services.decode.admission import DecodeSettings, Situation
from services.decode.effects import Effects, ReadKey, Unpack
from services.decode.forecast import HandoffForecast
from services.decode.handoffs import Handoffs, Lost
from services.decode.messages import (
    BeginAsked,
    Cancel,
    ChunkReady,
    FinishInfo,
    ManifestReceived,
    Submit,
    Surroundings,
    TokensOut,
)
from services.decode.pace import Pace
from services.decode.request import DecodeRequest
from services.decode.seats import Seats
from services.decode.steps import decode_step, prefill_step

ALONE_TOKENS = 4 * CHUNK_TOKENS


class DecodeScheduler:
    """All requests of one decode worker."""

    def __init__(
        self, layout: KvLayout, pools: KvPools, handoffs: Handoffs, settings: DecodeSettings
    ) -> None:
        self._layout = layout
        self._pools = pools
        self._handoffs = handoffs
        self._settings = settings
        self._live: dict[RequestId, DecodeRequest] = {}
        self._seats = Seats(pools)
        self._arrivals = 0
        self.pace = Pace(settings.itl_slack, min_tokens=pools.block_tokens, max_tokens=CHUNK_TOKENS)
        self._situation = Situation(Surroundings(0, True), self.pace, HandoffForecast())
        self._turns = PromptTurns()
        self.counters: Counter[str] = Counter()

    @property
    def _effects(self) -> Effects:
        return self._handoffs.effects

    def take_effects(self) -> Effects:
        """What is to be done since the last call."""
        effects, self._handoffs.effects = self._handoffs.effects, Effects()
        return effects

    @property
    def live(self) -> Mapping[RequestId, DecodeRequest]:
        """All requests that have not ended, in the order in which they came."""
        return self._live

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self._seats.active)

    @property
    def num_active(self) -> int:
        return len(self._seats.active)

    # Events.

    def submit(self, message: Submit, now: float) -> None:
        """A new request. A repeat of a live one is ignored; one that can never run is refused at once."""
        if message.request_id in self._live:
            self.counters["submit_repeated"] += 1
            return
        root = cache_root(self._layout, self._settings.tokenizer_digest, message.tenant, message.cache_salt)
        self._arrivals += 1
        request = DecodeRequest(message, root, self._arrivals, now)
        self._live[request.request_id] = request
        problem = admission.refusal(request, self._pools, self._settings)
        if problem is not None:
            self._end(request, DecodeEvent.FAIL, FinishInfo("error", request.trail(now), problem))
            return
        self._seats.wait(request)

    def cancel(self, message: Cancel, now: float) -> None:
        """Nobody wants more of it. Its blocks are free when this returns."""
        request = self._live.get(message.request_id)
        if request is None:
            return
        self._end(request, DecodeEvent.CANCEL, request.finish("abort", now))

    def surroundings(self, surroundings: Surroundings) -> None:
        """How the world looks now. With the last prefill worker gone its jobs need not wait any longer."""
        self._situation.surroundings = surroundings
        if surroundings.num_prefill_workers == 0:
            reason = admission.FALLBACKS[admission.no_prefill_reason(surroundings)]
            for lost in self._handoffs.abandon_unclaimed(reason):
                self._settle(lost)

    def begin(self, message: BeginAsked, now: float) -> None:
        """A prefill worker asks for a job that it claimed."""
        if message.too_slow:
            self._settle(self._handoffs.refuse_slow(message))
            return
        request = self._live.get(message.request_id)
        banned = list(request.banned(self._settings.eos_ids)) if request else []
        if self._handoffs.begin(request, message, banned, now) and request is not None:
            request.attempt = Attempt(request.attempt + 1)
            request.costs.prefill_worker = message.prefill_worker
            request.costs.started_at = now

    def job_unposted(self, request_id: RequestId) -> None:
        """The bus did not take a job."""
        self._settle(self._handoffs.unposted(request_id))

    def job_lost(self, request_id: RequestId, reason: Fallback) -> None:
        """Nobody will begin a job."""
        self._settle(self._handoffs.job_lost(request_id, reason))

    def chunk_ready(self, message: ChunkReady, now: float) -> None:
        self._settle(self._handoffs.chunk(message, now))

    def manifest(self, message: ManifestReceived, now: float) -> None:
        self._settle(self._handoffs.manifest(message, now))
        self._run_if_complete(message.request_id, now)

    def attempt_alive(self, request_id: RequestId, attempt: Attempt, now: float) -> None:
        self._handoffs.alive(request_id, attempt, now)

    def attempt_failed(self, request_id: RequestId, attempt: Attempt, kind: str, message: str) -> None:
        self._settle(self._handoffs.failed(request_id, attempt, kind, message))

    def read_ended(self, key: ReadKey, error: PeerError | None, now: float) -> Unpack | None:
        """A read is over. An `Unpack` must be carried out before anything else is asked of the brain."""
        ended = self._handoffs.read_ended(key, error, self._live.get(key.request_id), now)
        if isinstance(ended, Unpack):
            return ended
        self._settle(ended)
        return None

    def unpacked(self, key: ReadKey, channel: str, now: float) -> None:
        """The unpack of `read_ended` was carried out."""
        request = self._live.get(key.request_id)
        if request is not None:
            request.costs.channel = channel
            self._run_if_complete(key.request_id, now)

    # Plan and commit.

    def plan(self, now: float) -> StepPlan:
        """Who runs in the next step. Empty when nobody can."""
        for late in self._handoffs.expire(now):
            self._settle(late)
        self._admit(now)
        self._handoffs.start_reads(now)
        eos_ids = self._settings.eos_ids
        steps = [decode_step(r, eos_ids) for r in self._seats.ranked() if self._may_decode(r)]
        budget = self._prompt_tokens(len(steps))
        prompts = [r for r in self._seats.active if r.state is DecodeState.PREFILLING_LOCALLY]
        for request in self._turns.sorted(prompts, attrgetter("num_left")) if budget else ():
            steps.append(prefill_step(request, budget, eos_ids))
            budget -= len(steps[-1].tokens)
            if not budget:
                break
        return StepPlan(tuple(steps))

    def _prompt_tokens(self, num_decodes: int) -> int:
        """Of the next step. A colocated worker with nobody to keep waiting takes more than a chunk: matrices
        are multiplied a third faster."""
        if not self._settings.colocated:
            return self.pace.budget(num_decodes)
        return self.pace.max_tokens if num_decodes else ALONE_TOKENS

    def commit(self, plan: StepPlan, outcome: StepOutcome, elapsed_s: float, now: float) -> None:
        """Takes in what a step gave."""
        num_decodes = 0
        for step, token in zip(plan.steps, outcome.tokens, strict=True):
            request = self._live[step.request_id]
            num_decodes += request.state is DecodeState.RUNNING
            request.num_computed = step.start + len(step.tokens)
            self._seats.publish(request)
            if token != NOT_SAMPLED:
                if request.state is DecodeState.PREFILLING_LOCALLY:
                    request.costs.prefill_s += now - request.costs.started_at
                self._take_token(request, token, now)
        self.pace.learn(num_decodes, plan.num_tokens - num_decodes, elapsed_s)

    def next_deadline(self) -> float:
        """When `plan` should be called again although no event came."""
        return self._handoffs.next_deadline()

    def assert_empty(self) -> None:
        """Raises Internal unless nothing is left of any request."""
        self._seats.assert_empty()
        self._handoffs.assert_empty()
        if self._live:
            raise Internal(f"left: {list(self._live)}")

    def check_integrity(self) -> None:
        """Raises Internal unless the live requests own exactly the blocks that are owned."""
        self._pools.check_integrity(r.holding for r in self._live.values() if r.holding is not None)

    # Admission.

    def _admit(self, now: float) -> None:
        self._situation.num_unclaimed = self._handoffs.num_unclaimed
        self._situation.num_running = sum(r.state is DecodeState.RUNNING for r in self._seats.active)
        room = max(0, self._settings.max_batch - self._seats.num_taken)
        chosen = admission.admissible(self._seats, self._settings, self._situation)
        for request, local in itertools.islice(chosen, room):
            self._seats.take(request)
            self._start(request, local, now)

    def _start(self, request: DecodeRequest, local: PathReason | None, now: float) -> None:
        costs = request.costs
        costs.path = "local" if local else "disaggregated"
        is_long = request.num_left > self._settings.threshold_tokens
        costs.path_reason = local or (PathReason.LONG_PROMPT if is_long else PathReason.DECODE_BUSY)
        if not request.num_output and not costs.num_preempted:
            costs.num_cached_tokens = request.num_computed
        if not local:
            request.advance(DecodeEvent.ASK_PREFILL)
            costs.posted_at = now
            self._seats.await_kv(request)
            self._handoffs.post(request, now)
            self._situation.num_unclaimed = self._handoffs.num_unclaimed
            return
        self.counters[LOCAL + local] += 1
        lack = admission.FALLBACKS.get(local)
        if lack is not None and lack not in costs.fallbacks:
            self.counters[lack] += 1
            costs.fell_back(lack)
        costs.started_at = now
        request.advance(DecodeEvent.PREFILL_LOCALLY)
        self._seats.activate(request)

    # One step.

    def _may_decode(self, request: DecodeRequest) -> bool:
        """Makes sure of the block for the last token's KV. False when the request can't run in this step."""
        if request.state is not DecodeState.RUNNING or request.holding is None:
            return False
        need = len(request.tokens)
        if request.holding.num_tokens >= need:
            return True
        while not self._pools.can_grow(request.holding, need):
            victim = self._seats.victim()
            self._preempt(victim)
            if victim is request:
                return False
        request.holding.grow(need)
        return True

    def _preempt(self, request: DecodeRequest) -> None:
        """It starts over from its tokens. Its KV stays as cached prefix while there is room."""
        request.costs.num_preempted += 1
        self.counters["preempted"] += 1
        landing = self._handoffs.landing(request.request_id)
        if landing is not None:
            request.num_computed = max(request.num_computed, landing.num_contiguous)
            self._seats.publish(request)
        self._handoffs.void(request.request_id, "preempted")
        request.advance(DecodeEvent.PREEMPT)
        self._seats.wait(request)

    def _take_token(self, request: DecodeRequest, token: int, now: float) -> None:
        request.tokens.append(token)
        request.costs.first_token_at = request.costs.first_token_at or now
        request.costs.last_token_at = now
        reason = request.finish_reason(self._settings.eos_ids)
        if reason:
            self._end(request, DecodeEvent.FINISH, request.finish(reason, now), [token])
            return
        if request.state is not DecodeState.RUNNING:
            request.advance(DecodeEvent.FIRST_TOKEN)
        self._effects.tokens.append(TokensOut(request.request_id, request.num_output - 1, [token]))

    # Hand-off results and ends.

    def _run_if_complete(self, request_id: RequestId, now: float) -> None:
        landing = self._handoffs.landing(request_id)
        request = self._live.get(request_id)
        if landing is None or not landing.complete or request is None or landing.manifest is None:
            return
        self._handoffs.finish(request_id)
        costs = request.costs
        costs.landed(landing, now)
        self.counters[DISAGGREGATED] += 1
        self.counters[KV_BYTES] += landing.kv_bytes
        self.counters.update(landing.manifest.fallbacks)
        self.counters.update(landing.fallbacks)
        num_tokens = len(request.tokens) - landing.num_held
        self._situation.forecast.learn(costs.started_at - costs.posted_at, now - costs.started_at, num_tokens)
        request.num_computed = len(request.tokens)
        self._seats.publish(request)
        self._seats.activate(request)
        self._take_token(request, landing.manifest.first_token, now)

    def _settle(self, lost: Lost | None) -> None:
        """After a lost attempt: what landed whole stays as cached prefix, and the request waits again."""
        request = self._live.get(lost.request_id) if lost else None
        if request is None or lost is None:
            return
        self.counters[lost.reason] += 1
        request.costs.lost(lost.reason)
        request.num_computed = max(request.num_computed, lost.num_landed)
        self._seats.publish(request)
        request.advance(DecodeEvent.ATTEMPT_LOST)
        self._seats.wait(request)

    def _end(
        self, request: DecodeRequest, event: DecodeEvent, finish: FinishInfo, tokens: Iterable[int] = ()
    ) -> None:
        last = list(tokens)
        request.advance(event)
        self._handoffs.void(request.request_id, "cancelled")
        del self._live[request.request_id]
        self._seats.leave(request)
        self._effects.tokens.append(
            TokensOut(request.request_id, request.num_output - len(last), last, finish)
        )
