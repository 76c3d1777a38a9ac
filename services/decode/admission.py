"""Who is admitted next, whether it can be served here at all, and where its prompt is prefilled (pure).

Requests are admitted by their places, each when the pool can hold all of its tokens and one more. Nobody
passes one that waits for memory. Hand-offs wait for two things more: room on the bus, and that the blocks
of those which await their KV stay a share of the pool, so that a queue can't hoard memory; only what is
prefilled here passes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from diptych.domain.engine_report import FailureInfo
from diptych.domain.fallbacks import Fallback, PathReason
from diptych.domain.holding import KvPools
from diptych.domain.ids import CHUNK_TOKENS
from services.decode.forecast import HandoffForecast
from services.decode.messages import Surroundings
from services.decode.pace import Pace
from services.decode.request import DecodeRequest
from services.decode.seats import Seats

_LOOK_AHEAD = 32
"""Waiting requests that are looked at in one turn."""
_WORTH_A_HOP = 2.0
"""A short prompt is handed off when that is expected to be so many times faster, and saves `_SAVES_S`."""
_SAVES_S = 0.1
FALLBACKS = {
    PathReason.NO_PREFILL_WORKER: Fallback.NO_PREFILL_WORKER,
    PathReason.STORE_UNAVAILABLE: Fallback.STORE_UNAVAILABLE,
    PathReason.LINK_TOO_SLOW: Fallback.LINK_TOO_SLOW,
}
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
    reserve_share: float = 0.5
    """Most of the pool that those hold who await their KV; one alone may hold more."""


@dataclass(slots=True)
class Situation:
    """What admission weighs, beside the request and the pool."""

    surroundings: Surroundings
    pace: Pace
    forecast: HandoffForecast
    num_running: int = 0
    num_unclaimed: int = 0


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


def admissible(
    seats: Seats, settings: DecodeSettings, situation: Situation
) -> Iterator[tuple[DecodeRequest, PathReason | None]]:
    """Those that can start now, by their places, each with why its prompt is prefilled here (None: it is
    handed off). Whoever asks for the next has given the last one its seat."""
    may_hand_off = True
    for request in seats.waiting[:_LOOK_AHEAD]:
        local = local_reason(request, seats.pools, settings, situation)
        may_hand_off = may_hand_off and (
            local is not None or _can_reserve(request, seats, settings, situation)
        )
        if local is None and not may_hand_off:
            continue
        if not seats.can_take(request):
            return
        yield request, local


def local_reason(
    request: DecodeRequest, pools: KvPools, settings: DecodeSettings, situation: Situation
) -> PathReason | None:
    """Why to prefill on this worker; None for a hand-off."""
    surroundings = situation.surroundings
    uncached = len(request.tokens) - pools.cached_tokens(request.hashes, len(request.tokens) - 1)
    if settings.colocated:
        return PathReason.COLOCATED
    can_hand_off = surroundings.store_available and surroundings.num_prefill_workers > 0
    if uncached <= settings.threshold_tokens and not (can_hand_off and _is_slower_here(uncached, situation)):
        return PathReason.SHORT_PROMPT
    if not surroundings.store_available:
        return PathReason.STORE_UNAVAILABLE
    if surroundings.num_prefill_workers == 0:
        return no_prefill_reason(surroundings)
    return PathReason.ATTEMPTS_FAILED if request.costs.lost_too_often else None


def _is_slower_here(num_tokens: int, situation: Situation) -> bool:
    """Whether running decodes leave so little of each step that the way over a prefill worker is faster."""
    there_s = situation.forecast.handoff_s(num_tokens)
    here_s = situation.pace.local_s(num_tokens, situation.num_running)
    return 0.0 < there_s < min(here_s / _WORTH_A_HOP, here_s - _SAVES_S)


def _can_reserve(
    request: DecodeRequest, seats: Seats, settings: DecodeSettings, situation: Situation
) -> bool:
    if situation.num_unclaimed >= settings.max_unclaimed:
        return False
    most, reserved = settings.reserve_share * seats.pools.total_tokens, seats.reserved_tokens
    return not reserved or reserved + len(request.tokens) + 1 <= most


def no_prefill_reason(surroundings: Surroundings) -> PathReason:
    """Why no prefill worker can be asked, where none can."""
    return PathReason.LINK_TOO_SLOW if surroundings.num_too_slow else PathReason.NO_PREFILL_WORKER
