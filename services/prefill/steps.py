"""An attempt's part of the next step (pure)."""

from __future__ import annotations

from diptych.domain.plan import SequenceStep
from services.prefill.job import PrefillJob


def prefill_step(job: PrefillJob, budget: int) -> SequenceStep:
    """Up to `budget` tokens, within one chunk; with the last of the prompt, the draw of the first token."""
    assert job.holding is not None
    tokens = job.next_compute(budget)
    last = job.num_computed + len(tokens) == len(job.tokens)
    return SequenceStep(
        job.key.request_id, tokens, job.num_computed, job.holding.tables,
        job.params if last else None, job.banned if last else (),
    )  # fmt: skip
