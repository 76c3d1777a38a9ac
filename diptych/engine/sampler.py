"""From logits to tokens: greedy, or drawn by inverse CDF with counter-based randomness.

Filters come in vLLM's order: banned ids, temperature, min-p (on all of the vocabulary), top-k, top-p (on
what top-k left). What passes is drawn by the number `uniform(seed, 0, position)`: the first candidate, by
falling probability, where the cumulated probability exceeds it. Each row is worked out by itself, so that
it cannot depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.domain.errors import Internal
from diptych.domain.sampling import SamplingParams, uniform


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn. `position` is the index of the drawn token in its sequence."""

    params: SamplingParams
    position: int
    banned: tuple[int, ...] = ()


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of each row of `logits`, fp32 [rows, vocab], which is changed in place.

    Raises Internal when a row has no finite logit left, which is a broken model or a ban on everything.
    """
    for row, draw in zip(logits, draws, strict=True):
        if draw.banned:
            row[list(draw.banned)] = -torch.inf
    best, tokens = (part.tolist() for part in logits.max(dim=-1))
    for index, draw in enumerate(draws):
        if not math.isfinite(best[index]):
            raise Internal(f"no token can be drawn: the highest logit of row {index} is {best[index]}")
        if draw.params.temperature > 0.0:
            tokens[index] = _drawn(logits[index], draw)
    return tokens


def filtered(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The candidates that pass the filters, by falling probability, and their probabilities (fp32, summing
    to 1).

    `logits` [vocab]; both results [candidates]. The temperature must be above 0.
    """
    scaled = (logits - logits.max()) / params.temperature
    if params.min_p > 0.0:
        scaled = torch.where(scaled >= math.log(params.min_p), scaled, -torch.inf)
    if 0 < params.top_k < len(scaled):
        values, ids = torch.topk(scaled, params.top_k)
    else:
        values, ids = torch.sort(scaled, descending=True, stable=True)
    probabilities = torch.softmax(values, dim=-1)
    if params.top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        # The first always passes: `before` starts at 0 and top_p is above it.
        keep = int((before < params.top_p).sum())
        ids, probabilities = ids[:keep], probabilities[:keep] / probabilities[:keep].sum()
    return ids, probabilities


def _drawn(logits: Tensor, draw: Draw) -> int:
    ids, probabilities = filtered(logits, draw.params)
    cumulated = probabilities.double().cumsum(dim=-1)
    number = uniform(draw.params.seed, 0, draw.position) * float(cumulated[-1])
    index = int(torch.searchsorted(cumulated, number, right=True))
    # Rounding may carry the number to the end: the last candidate with a chance is meant.
    return int(ids[min(index, int((probabilities > 0).sum()) - 1)])
