"""Whether a request can be served here at all, and whether its prompt is prefilled here (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.domain.engine_report import FailureInfo
from diptych.domain.holding import KvPools
from diptych.domain.ids import CHUNK_TOKENS
from services.decode.messages import Surroundings
from services.decode.request import DecodeRequest

_LOCAL_AFTER_LOSSES = 2
FALLBACKS = frozenset({"no_prefill_worker", "store_unavailable", "link_too_slow"})
"""Reasons to prefill here that are a lack, and are counted as one."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """`colocated`: never hand off (`--role both`). `threshold_tokens`: a shorter uncached rest is prefilled
    here."""

    max_context: int
    eos_ids: frozenset[int]
    tokenizer_digest: bytes = b""
    colocated: bool = False
    threshold_tokens: int = CHUNK_TOKENS
    max_batch: int = 64
    max_unclaimed: int = 4
    itl_slack: float = 0.25
    pool_share: float = 0.6
    """Most of the pool that one request may need (M13)."""


def refusal(request: DecodeRequest, pools: KvPools, settings: DecodeSettings) -> FailureInfo | None:
    """Why a request can never run here; None when it can. Routers check the same: each worker does for
    itself."""
    rest = request.params.max_tokens - request.num_given
    total = len(request.tokens) + rest
    if not request.tokens or rest < 1:
        return FailureInfo("InvalidField", "tokens: nothing to run, or max_tokens is used up")
    if total > settings.max_context:
        bound = f"prompt and output make {total} positions, the context has {settings.max_context}"
        return FailureInfo("InvalidField", f"max_tokens: {bound}")
    most = int(pools.total_tokens * settings.pool_share)
    if total > most:
        return FailureInfo(
            "TooLarge", f"prompt and output need KV of {total} tokens, one request may have {most}"
        )
    return None


def local_reason(
    request: DecodeRequest, pools: KvPools, settings: DecodeSettings, surroundings: Surroundings
) -> str:
    """Why to prefill on this worker, a word of a closed set; empty for a hand-off."""
    uncached = len(request.tokens) - pools.cached_tokens(request.hashes, len(request.tokens) - 1)
    if settings.colocated:
        return "colocated"
    if uncached <= settings.threshold_tokens:
        return "short_prompt"
    if not surroundings.store_available:
        return "store_unavailable"
    if surroundings.num_prefill_workers == 0:
        return no_prefill_reason(surroundings)
    return "attempts_failed" if request.costs.num_losses >= _LOCAL_AFTER_LOSSES else ""


def no_prefill_reason(surroundings: Surroundings) -> str:
    """Why no prefill worker can be asked, where none can."""
    return "link_too_slow" if surroundings.num_too_slow else "no_prefill_worker"
