"""One request as the decode brain keeps it: its tokens, its blocks, and what its life has cost so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.domain.fallbacks import Fallback
from diptych.domain.hashing import extend_chain
from diptych.domain.holding import Holding
from diptych.domain.ids import Attempt, BlockHash
from diptych.domain.lifecycle import DecodeEvent, DecodeState, advance_decode
from diptych.domain.order import place
from diptych.domain.sampling import SamplingParams
from services.decode.landing import Landing
from services.decode.messages import FinishInfo, Submit, TrailInfo

_WORTH_ANOTHER = frozenset(
    {
        Fallback.PREFILL_LOST, Fallback.PREFILL_STALLED, Fallback.PREFILL_FAILED, Fallback.TRANSFER_FAILED,
        Fallback.DIGEST_WRONG, Fallback.LINK_TOO_SLOW, Fallback.CLAIM_STALLED, Fallback.JOB_GONE,
    }
)  # fmt: skip
"""Losses after which another prefill worker is asked, once; after any other the prompt is prefilled here."""
_LOCAL_AFTER = 2


@dataclass(slots=True)
class Costs:
    """Stamps and counts for the trail. Stamps are the engine's monotonic clock, in seconds."""

    submitted_at: float
    posted_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    prefill_worker: str = ""
    path: str = ""
    path_reason: str = ""
    channel: str = ""
    num_chunks: int = 0
    kv_bytes: int = 0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    exposed_s: float = 0.0
    num_cached_tokens: int = 0
    num_preempted: int = 0
    num_losses: int = 0
    num_borrowed_tokens: int = 0
    fallbacks: dict[Fallback, int] = field(default_factory=dict)

    def landed(self, landing: Landing, now: float) -> None:
        """A hand-off is complete."""
        assert landing.manifest is not None
        self.prefill_s = landing.manifest.prefill_s
        self.handoff_s = landing.handoff_s
        self.exposed_s = now - (landing.manifest.computed_at or landing.manifest_at)
        self.num_chunks, self.kv_bytes = len(landing.landed), landing.kv_bytes
        self.num_cached_tokens = max(self.num_cached_tokens, landing.manifest.num_cached_tokens)
        self.num_borrowed_tokens = landing.manifest.num_borrowed_tokens
        for fallback, count in landing.manifest.fallbacks.items():
            self.fell_back(fallback, count)
        for fallback in landing.fallbacks:
            self.fell_back(fallback)

    def lost(self, reason: Fallback) -> None:
        """A hand-off came to nothing."""
        self.num_losses += 1 if reason in _WORTH_ANOTHER else _LOCAL_AFTER
        self.fell_back(reason)

    @property
    def lost_too_often(self) -> bool:
        """Whether the prompt is prefilled here from now on."""
        return self.num_losses >= _LOCAL_AFTER

    def fell_back(self, reason: Fallback, count: int = 1) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + count


class DecodeRequest:
    """A live request. Whoever holds `holding` owns those blocks; the scheduler alone changes `state`."""

    __slots__ = (
        "arrival", "attempt", "costs", "hashes", "holding", "num_computed", "num_given", "num_prompt",
        "params", "place", "priority", "request_id", "root", "state", "tokens",
    )  # fmt: skip

    def __init__(self, message: Submit, root: BlockHash, arrival: int, now: float) -> None:
        self.request_id = message.request_id
        self.tokens = list(message.tokens)
        self.num_prompt = len(message.tokens) - message.num_output
        self.num_given = message.num_output
        self.params: SamplingParams = message.params
        self.priority = message.priority
        self.arrival = arrival
        self.place = place(message.priority, now, arrival)
        self.root = root
        self.hashes: list[BlockHash] = []
        self.state = DecodeState.ADMITTED
        self.holding: Holding | None = None
        self.num_computed = 0
        self.attempt = Attempt(0)
        self.costs = Costs(submitted_at=now)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def advance(self, event: DecodeEvent) -> None:
        self.state = advance_decode(self.state, event)

    @property
    def num_left(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.num_computed

    def extend_hashes(self, block_tokens: int) -> None:
        """Names the full blocks of all tokens so far."""
        parent = self.hashes[-1] if self.hashes else self.root
        for end in range((len(self.hashes) + 1) * block_tokens, len(self.tokens) + 1, block_tokens):
            parent = extend_chain(parent, self.tokens[end - block_tokens : end])
            self.hashes.append(parent)

    def banned(self, eos_ids: frozenset[int]) -> tuple[int, ...]:
        """Ids that may not be drawn next."""
        if self.num_output >= self.params.min_tokens:
            return ()
        return tuple(sorted(eos_ids | set(self.params.stop_token_ids)))

    def finish_reason(self, eos_ids: frozenset[int]) -> str:
        """Why the last token ends the request, or empty."""
        last = self.tokens[-1]
        ends = last in self.params.stop_token_ids or (last in eos_ids and not self.params.ignore_eos)
        if ends and self.num_output >= self.params.min_tokens:
            return "stop"
        return "length" if self.num_output >= self.params.max_tokens else ""

    def trail(self, now: float) -> TrailInfo:
        costs = self.costs
        first, last = costs.first_token_at, costs.last_token_at
        return TrailInfo(
            prefill_worker=costs.prefill_worker,
            path=costs.path,
            path_reason=costs.path_reason,
            attempts=self.attempt,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=costs.num_cached_tokens,
            num_chunks=costs.num_chunks,
            kv_bytes=costs.kv_bytes,
            channel=costs.channel,
            queue_s=(costs.started_at or now) - costs.submitted_at,
            prefill_s=costs.prefill_s,
            handoff_s=costs.handoff_s,
            exposed_s=costs.exposed_s,
            decode_s=last - first if first else 0.0,
            ttft_s=(first or now) - costs.submitted_at,
            num_preempted=costs.num_preempted,
            fallbacks=dict(costs.fallbacks),
            num_borrowed_tokens=costs.num_borrowed_tokens,
        )

    def finish(self, reason: str, now: float) -> FinishInfo:
        return FinishInfo(reason, self.trail(now))
