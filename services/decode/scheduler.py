"""The decode brain: who runs in the next step, whose KV comes from where, who gives up blocks for whom.

    events (submit, cancel, begin, chunk, manifest, read ended, …) and `now` in
    plan(now) → the runner → commit(plan, outcome, now)        effects out

A waiting request is admitted when the pool can hold all of its tokens and one more; admission takes the
blocks, so that everything after it can only be waiting for *time*, never for memory that someone else who
waits is holding. A running request that needs a block takes it from the youngest one that runs or prefills
here (which then starts over from its tokens); the oldest is never preempted, so that it always ends.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping

from diptych.domain.engine_report import FailureInfo
from diptych.domain.errors import Internal, PeerError
from diptych.domain.hashing import cache_root
from diptych.domain.holding import KvPools
from diptych.domain.ids import CHUNK_TOKENS, Attempt, RequestId
from diptych.domain.layout import KvLayout
from diptych.domain.lifecycle import DecodeEvent, DecodeState
from diptych.domain.plan import NOT_SAMPLED, SequenceStep, StepOutcome, StepPlan
from services.decode import admission
from services.decode.admission import DecodeSettings
from services.decode.effects import Effects, ReadKey, Unpack
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

_LOSSES = {"PeerLost": "prefill_lost", "TooLarge": "prefill_too_small"}
_WORTH_ANOTHER = frozenset(
    {
        "prefill_lost", "prefill_stalled", "prefill_failed", "transfer_failed", "digest_wrong", "superseded",
        "link_too_slow",
    }
)  # fmt: skip
"""Losses after which another prefill worker is asked, once; after any other the prompt is prefilled here."""


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
        self._waiting: list[DecodeRequest] = []
        self._active: list[DecodeRequest] = []
        """Those with blocks that run or prefill here, in order."""
        self._surroundings = Surroundings(0, True)
        self._arrivals = 0
        most = CHUNK_TOKENS
        self.pace = Pace(settings.itl_slack, min_tokens=pools.block_tokens, max_tokens=most)
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
        return len(self._live) - len(self._active)

    @property
    def num_active(self) -> int:
        return len(self._active)

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
            self._end(request, DecodeEvent.FAIL, self._failure(request, problem, now))
            return
        request.extend_hashes(self._pools.block_tokens)
        bisect.insort(self._waiting, request, key=lambda r: r.order)

    def cancel(self, message: Cancel, now: float) -> None:
        """Nobody wants more of it. Its blocks are free when this returns."""
        request = self._live.get(message.request_id)
        if request is None:
            return
        self._end(request, DecodeEvent.CANCEL, request.finish("abort", now))

    def surroundings(self, surroundings: Surroundings) -> None:
        """How the world looks now. With the last prefill worker gone its jobs need not wait any longer."""
        self._surroundings = surroundings
        if surroundings.num_prefill_workers == 0:
            for lost in self._handoffs.abandon_unclaimed(admission.no_prefill_reason(surroundings)):
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

    def chunk_ready(self, message: ChunkReady, now: float) -> None:
        self._settle(self._handoffs.chunk(message, now))

    def manifest(self, message: ManifestReceived, now: float) -> None:
        self._settle(self._handoffs.manifest(message, now))
        self._run_if_complete(message.request_id, now)

    def attempt_alive(self, request_id: RequestId, attempt: Attempt, now: float) -> None:
        self._handoffs.alive(request_id, attempt, now)

    def attempt_failed(self, request_id: RequestId, attempt: Attempt, kind: str, message: str) -> None:
        reason = _LOSSES.get(kind, "prefill_failed")
        self._settle(self._handoffs.failed(request_id, attempt, reason, message))

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
        steps = [self._decode_step(request) for request in list(self._active) if self._may_decode(request)]
        budget = self.pace.max_tokens if self._settings.colocated else self.pace.budget(len(steps))
        for request in self._active:
            if request.state is DecodeState.PREFILLING_LOCALLY and budget > 0:
                steps.append(self._prefill_step(request, budget))
                budget -= len(steps[-1].tokens)
        return StepPlan(tuple(steps))

    def commit(self, plan: StepPlan, outcome: StepOutcome, elapsed_s: float, now: float) -> None:
        """Takes in what a step gave."""
        num_decodes = 0
        for step, token in zip(plan.steps, outcome.tokens, strict=True):
            request = self._live[step.request_id]
            num_decodes += request.state is DecodeState.RUNNING
            request.num_computed = step.start + len(step.tokens)
            self._publish(request)
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
        self._pools.check_integrity([])
        self._handoffs.assert_empty()
        if self._live or self._waiting or self._active:
            raise Internal(f"left: {list(self._live)}")

    def check_integrity(self) -> None:
        """Raises Internal unless the live requests own exactly the blocks that are owned."""
        self._pools.check_integrity(r.holding for r in self._live.values() if r.holding is not None)

    # Admission.

    def _admit(self, now: float) -> None:
        for request in list(self._waiting):
            bus_full = self._handoffs.num_unclaimed >= self._settings.max_unclaimed
            if len(self._active) >= self._settings.max_batch:
                return
            if bus_full and len(request.tokens) > self._settings.threshold_tokens:
                continue
            local = admission.local_reason(request, self._pools, self._settings, self._surroundings)
            need, limit = len(request.tokens) + 1, len(request.tokens) - 1
            if not self._pools.can_open(request.hashes, limit, need):
                return
            self._waiting.remove(request)
            request.holding = self._pools.open(request.hashes, limit)
            request.holding.grow(need)
            request.num_computed = request.holding.num_cached_tokens
            self._start(request, local, now)

    def _start(self, request: DecodeRequest, local: str, now: float) -> None:
        costs = request.costs
        costs.path = "local" if local else "disaggregated"
        costs.path_reason = local or "long_prompt"
        if not request.num_output and not costs.num_preempted:
            costs.num_cached_tokens = request.num_computed
        if not local:
            request.advance(DecodeEvent.ASK_PREFILL)
            self._handoffs.post(request, now)
            return
        if local in admission.FALLBACKS and local not in costs.fallbacks:
            self._count_fallback(request, local)
        costs.started_at = now
        request.advance(DecodeEvent.PREFILL_LOCALLY)
        bisect.insort(self._active, request, key=lambda r: r.order)

    # One step.

    def _may_decode(self, request: DecodeRequest) -> bool:
        """Makes sure of the block for the last token's KV. False when the request can't run in this step."""
        if request.state is not DecodeState.RUNNING or request.holding is None:
            return False
        need = len(request.tokens)
        while request.holding.num_tokens < need:
            if self._pools.can_grow(request.holding, need):
                request.holding.grow(need)
                return True
            victim = self._active[-1]
            if victim is request:
                if len(self._active) > 1:
                    self._preempt(request)
                return False
            self._preempt(victim)
        return True

    def _preempt(self, request: DecodeRequest) -> None:
        request.costs.num_preempted += 1
        self.counters["preempted"] += 1
        request.advance(DecodeEvent.PREEMPT)
        self._wait_again(request)

    def _wait_again(self, request: DecodeRequest) -> None:
        if request in self._active:
            self._active.remove(request)
        if request.holding is not None:
            request.holding.release()
            request.holding = None
        request.num_computed = 0
        request.extend_hashes(self._pools.block_tokens)
        bisect.insort(self._waiting, request, key=lambda r: r.order)

    def _decode_step(self, request: DecodeRequest) -> SequenceStep:
        assert request.holding is not None
        start = len(request.tokens) - 1
        banned = request.banned(self._settings.eos_ids)
        return SequenceStep(
            request.request_id, request.tokens[-1:], start, request.holding.tables, request.params, banned
        )

    def _prefill_step(self, request: DecodeRequest, budget: int) -> SequenceStep:
        assert request.holding is not None
        start = request.num_computed
        tokens = request.tokens[start : start + budget]
        last = start + len(tokens) == len(request.tokens)
        return SequenceStep(
            request.request_id,
            tokens,
            start,
            request.holding.tables,
            request.params if last else None,
            request.banned(self._settings.eos_ids) if last else (),
        )

    def _publish(self, request: DecodeRequest) -> None:
        if request.holding is not None:
            request.extend_hashes(self._pools.block_tokens)
            request.holding.publish_upto(request.num_computed, request.hashes)

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
        costs.prefill_s = landing.manifest.prefill_s
        costs.handoff_s = landing.handoff_s
        costs.exposed_s = now - landing.manifest_at
        costs.num_chunks, costs.kv_bytes = len(landing.landed), landing.kv_bytes
        costs.num_cached_tokens = max(costs.num_cached_tokens, landing.manifest.num_cached_tokens)
        request.num_computed = len(request.tokens)
        self._publish(request)
        bisect.insort(self._active, request, key=lambda r: r.order)
        self._take_token(request, landing.manifest.first_token, now)

    def _settle(self, lost: Lost | None) -> None:
        """After a lost attempt: what landed whole stays as cached prefix, and the request waits again."""
        request = self._live.get(lost.request_id) if lost else None
        if request is None or lost is None:
            return
        request.costs.num_losses += 1 if lost.reason in _WORTH_ANOTHER else 2
        self._count_fallback(request, lost.reason)
        request.num_computed = max(request.num_computed, lost.num_landed)
        self._publish(request)
        request.advance(DecodeEvent.ATTEMPT_LOST)
        self._wait_again(request)

    def _count_fallback(self, request: DecodeRequest, reason: str) -> None:
        self.counters[reason] += 1
        request.costs.fallbacks[reason] = request.costs.fallbacks.get(reason, 0) + 1

    def _failure(self, request: DecodeRequest, failure: FailureInfo, now: float) -> FinishInfo:
        return FinishInfo("error", request.trail(now), failure=failure)

    def _end(
        self, request: DecodeRequest, event: DecodeEvent, finish: FinishInfo, tokens: Iterable[int] = ()
    ) -> None:
        last = list(tokens)
        request.advance(event)
        self._handoffs.void(request.request_id, "cancelled")
        del self._live[request.request_id]
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._active:
            self._active.remove(request)
        if request.holding is not None:
            request.holding.release()
            request.holding = None
        self._effects.tokens.append(
            TokensOut(request.request_id, request.num_output - len(last), last, finish)
        )
