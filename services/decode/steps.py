"""A request's part of the next step (pure)."""

from __future__ import annotations

from diptych.domain.plan import SequenceStep
from services.decode.request import DecodeRequest


def decode_step(request: DecodeRequest, eos_ids: frozenset[int]) -> SequenceStep:
    """The last token, whose KV is not there yet, and the draw of the next."""
    assert request.holding is not None
    start = len(request.tokens) - 1
    return SequenceStep(
        request.request_id, request.tokens[-1:], start, request.holding.tables, request.params,
        request.banned(eos_ids),
    )  # fmt: skip


def prefill_step(request: DecodeRequest, budget: int, eos_ids: frozenset[int]) -> SequenceStep:
    """Up to `budget` tokens that have no KV yet; with the last of them, the draw of the first new one."""
    assert request.holding is not None
    start = request.num_computed
    tokens = request.tokens[start : start + budget]
    last = start + len(tokens) == len(request.tokens)
    return SequenceStep(
        request.request_id, tokens, start, request.holding.tables,
        request.params if last else None, request.banned(eos_ids) if last else (),
    )  # fmt: skip
