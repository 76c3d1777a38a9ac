"""Whether a prompt can be prefilled here at all (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.domain.engine_report import FailureInfo
from diptych.domain.holding import KvPools
from diptych.domain.ids import CHUNK_TOKENS
from services.prefill.job import PrefillJob


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """`offer_chunks`: whether whole chunks stay readable for the cache service too."""

    fingerprint: str
    max_context: int
    step_tokens: int = CHUNK_TOKENS
    offer_chunks: bool = True


def refusal(job: PrefillJob, pools: KvPools, settings: PrefillSettings) -> FailureInfo | None:
    """Why an attempt can never run here; None when it can."""
    most = min(pools.total_tokens, settings.max_context)
    if 0 < len(job.tokens) <= most and 0 <= job.num_held < len(job.tokens):
        return None
    return FailureInfo("TooLarge", f"{len(job.tokens)} tokens, this prefill worker's pool holds {most}")
