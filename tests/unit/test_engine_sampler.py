"""The sampler against exact probabilities, worked out by brute force in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from diptych.domain.errors import Internal
from diptych.domain.sampling import SamplingParams, uniform
from diptych.engine import sampler
from diptych.engine.sampler import Draw, filtered, sample

pytestmark = pytest.mark.engine

VOCAB = 50


def _logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def _params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def _expected(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Probability of each id: temperature, then min-p, top-k, top-p, each on what the one before left."""
    scaled = logits.double().numpy() / params.temperature
    odds = np.exp(scaled - scaled.max())
    odds[odds < params.min_p] = 0.0
    order = np.argsort(-odds, kind="stable")
    if params.top_k:
        odds[order[params.top_k :]] = 0.0
    odds /= odds.sum()
    before = np.cumsum(odds[order]) - odds[order]
    odds[order[before >= params.top_p]] = 0.0
    return odds / odds.sum()


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_filters_leave_the_exact_distribution(fields: dict[str, float]) -> None:
    params = _params(**fields)
    logits = _logits()[0]
    ids, probabilities = filtered(logits, params)
    found = np.zeros(VOCAB)
    found[ids.numpy()] = probabilities.numpy()
    np.testing.assert_allclose(found, _expected(logits, params), atol=1e-6)


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_draws_follow_the_exact_distribution(fields: dict[str, float]) -> None:
    """4,000 draws; chi-squared within six standard deviations, and nothing impossible drawn."""
    num_draws = 4000
    params = _params(**fields, seed=11)
    logits = _logits()
    expected = _expected(logits[0], params)
    draws = [Draw(params, position) for position in range(num_draws)]
    tokens = sample(logits.expand(num_draws, -1), draws)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any()
    possible = expected > 0
    wanted = expected[possible] * num_draws
    chi_squared = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    freedom = int(possible.sum()) - 1
    # A rare id contributes more variance than a normal one: 1 / expected count each.
    deviation = math.sqrt(2 * freedom + float((1 / wanted).sum()))
    assert chi_squared <= freedom + 6 * deviation


def test_a_draw_is_the_inverse_of_the_cumulated_distribution() -> None:
    params = _params(temperature=1.0, top_k=10, seed=5)
    logits = _logits()
    ids, probabilities = filtered(logits[0], params)
    ends = np.cumsum(probabilities.double().numpy())
    for position in range(50):
        passed = int((ends <= uniform(5, 0, position)).sum())
        assert sample(logits.clone(), [Draw(params, position)]) == [int(ids[passed])]


def test_greedy_takes_the_highest_logit() -> None:
    logits = _logits(4)
    tokens = sample(logits.clone(), [Draw(_params(temperature=0.0, top_k=3, seed=i), i) for i in range(4)])
    assert tokens == logits.argmax(-1).tolist()


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = _logits(30)
    draws = [Draw(_params(**FILTERS[i % len(FILTERS)], seed=i), i, (i,)) for i in range(29)]
    draws.append(Draw(_params(temperature=0.0), 3))
    together = sample(logits.clone(), draws)
    alone = [sample(logits[i : i + 1].clone(), [draw])[0] for i, draw in enumerate(draws)]
    backwards = sample(logits.flip(0).clone(), draws[::-1])[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_out_before_all_filters(temperature: float) -> None:
    logits = _logits()
    best = int(logits.argmax())
    second = int(logits[0].topk(2).indices[1])
    draw = Draw(_params(temperature=temperature, top_k=1), 0, (best,))
    assert sample(logits, [draw]) == [second]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_logits_that_say_nothing_are_an_error(value: float) -> None:
    with pytest.raises(Internal, match="no token can be drawn"):
        sample(torch.full((1, VOCAB), value), [Draw(_params(temperature=1.0), 0)])


def test_a_ban_on_everything_is_an_error() -> None:
    with pytest.raises(Internal, match="no token can be drawn"):
        sample(_logits(), [Draw(_params(), 0, tuple(range(VOCAB)))])


@pytest.mark.parametrize("spread", [5.0, 0.01], ids=["few make the mass", "all are needed"])
def test_top_p_on_a_large_vocabulary(spread: float) -> None:
    params = _params(temperature=1.0, top_p=0.9)
    logits = _logits(vocab=4 * sampler._USUALLY_ENOUGH)[0] * spread
    ids, probabilities = filtered(logits, params)
    found = np.zeros(len(logits))
    found[ids.numpy()] = probabilities.numpy()
    np.testing.assert_allclose(found, _expected(logits, params), atol=2e-6)


def test_the_last_candidate_is_drawn_when_the_number_rounds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda *_: 1.0)
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    assert sample(logits, [Draw(_params(temperature=1.0), 0)]) == [1]


def test_a_low_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = _logits() * 1e4
    best = int(logits.argmax())
    assert sample(logits, [Draw(_params(temperature=1e-5, seed=9), 0)]) == [best]
