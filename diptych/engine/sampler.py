"""From logits to tokens: greedy, or drawn by inverse CDF with counter-based randomness.

Filters come in vLLM's order: banned ids, temperature, min-p (on all of the vocabulary), top-k, top-p (on what
top-k left). Of the candidates that pass, the first is drawn at which the cumulated probability exceeds
`uniform(seed, 0, position)`. Each row is worked out by itself, so that it cannot depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.domain.errors import Internal
from diptych.domain.sampling import SamplingParams, uniform

_USUALLY_ENOUGH = 1024
"""Top-p sorts this many candidates first, and the whole vocabulary (some milliseconds) only if they are too
few."""


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
    """The candidates that pass the filters, and their probabilities (fp32, summing to 1): [candidates] each.

    By falling probability where top-k or top-p are set, else all of the vocabulary by id, which needs no
    sorting. `logits` [vocab], the highest of them finite; the temperature must be above 0.
    """
    scaled = (logits - logits.max()) / params.temperature
    if params.min_p > 0.0:
        scaled = torch.where(scaled >= math.log(params.min_p), scaled, -torch.inf)
    if 0 < params.top_k < len(scaled):
        values, ids = torch.topk(scaled, params.top_k)
        probabilities = torch.softmax(values, dim=-1)
    elif params.top_p < 1.0:
        ids, probabilities = _likeliest(torch.softmax(scaled, dim=-1), params.top_p)
    else:
        return torch.arange(len(scaled), device=scaled.device), torch.softmax(scaled, dim=-1)
    if params.top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        # The first always passes: nothing comes before it, and top_p is above 0.
        keep = int((before < params.top_p).sum())
        ids, probabilities = ids[:keep], probabilities[:keep] / probabilities[:keep].sum()
    return ids, probabilities


def _likeliest(probabilities: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """At least as many ids as make up `mass`, by falling probability, and their probabilities."""
    if len(probabilities) > _USUALLY_ENOUGH:
        values, ids = torch.topk(probabilities, _USUALLY_ENOUGH)
        if float(values.sum()) > mass:
            return ids, values
    values, ids = torch.sort(probabilities, descending=True, stable=True)
    return ids, values


def _drawn(logits: Tensor, draw: Draw) -> int:
    ids, probabilities = filtered(logits, draw.params)
    cumulated = probabilities.double().cumsum(dim=-1)
    number = uniform(draw.params.seed, 0, draw.position) * float(cumulated[-1])
    index = int(torch.searchsorted(cumulated, number, right=True))
    if index == len(ids):  # rounded up to the whole: the last candidate that has a chance is meant
        index = int(probabilities.nonzero()[-1])
    return int(ids[index])
