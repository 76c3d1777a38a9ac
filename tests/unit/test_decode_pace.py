"""What local prefill may cost those that decode: at most the slack, on average and step by step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.decode.pace import Pace


def _learnt(slack: float = 0.25, decode_s: float = 0.010, token_s: float = 0.0001) -> Pace:
    pace = Pace(slack, min_tokens=16, max_tokens=256)
    pace.learn(4, 0, decode_s)
    pace.learn(4, 16, decode_s + 16 * token_s)
    for _ in range(20):
        pace.learn(4, 0, decode_s)
    return pace


def test_alone_a_prompt_has_all_of_it() -> None:
    assert Pace(0.25, 16, 256).budget(0) == 256
    assert _learnt().budget(0) == 256


def test_nothing_known_is_the_smallest_portion() -> None:
    assert Pace(0.25, 16, 256).budget(3) == 16


def test_cheap_tokens_fill_the_slack_of_each_step() -> None:
    assert _learnt(token_s=0.0001).budget(4) == 25  # 2.5 ms
    assert _learnt(token_s=0.000001).budget(4) == 256


def test_dear_tokens_are_saved_for() -> None:
    """16 tokens cost 16 ms, and a step earns 2.5: one portion in every seven steps."""
    pace = _learnt(token_s=0.001)
    granted = []
    for _ in range(70):
        granted.append(pace.budget(4))
        pace.learn(4, granted[-1], 0.010 + 0.001 * granted[-1])
    assert set(granted) == {0, 16}
    assert granted[0] == 16
    assert sum(granted) in (160, 176)


def test_without_slack_a_prompt_still_ends() -> None:
    pace = _learnt(slack=0.0, token_s=0.001)
    granted = 0
    for _ in range(1000):
        budget = pace.budget(4)
        granted += budget
        pace.learn(4, budget, 0.010 + 0.001 * budget)
    assert 64 <= granted <= 128


def test_quiet_saves_no_more_than_one_portion() -> None:
    pace = _learnt(token_s=0.001)
    for _ in range(10_000):
        pace.learn(4, 0, 0.010)
    assert pace.budget(4) == 16
    pace.learn(4, 16, 0.026)
    assert pace.budget(4) == 0


def test_a_step_during_which_the_process_was_stopped_is_no_debt_for_ever() -> None:
    pace = _learnt(token_s=0.0001)
    pace.learn(4, 16, 30.0)
    steps = 0
    while pace.budget(4) == 0:
        pace.learn(4, 0, 0.010)
        steps += 1
    assert steps < 30


def test_how_long_a_prompt_will_take_here() -> None:
    pace = _learnt(token_s=0.001)
    assert pace.local_s(100, 0) == pytest.approx(0.1)
    assert pace.local_s(100, 4) == pytest.approx(0.5)  # a fifth of each step is the prompt's
    assert Pace(0.25, 16, 256).local_s(100, 4) == 0.0


@given(
    slack=st.floats(0.05, 1.0),
    decode_ms=st.floats(1.0, 50.0),
    price=st.floats(0.002, 0.5),
    noise=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1 << 30),
)
def test_the_slack_is_kept_and_the_prompt_goes_on(
    slack: float, decode_ms: float, price: float, noise: float, seed: int
) -> None:
    """`price` of a prompt token, in decode steps."""
    token_us = price * decode_ms * 1e3
    chance = random.Random(seed)
    pace = Pace(slack, min_tokens=16, max_tokens=256)
    pace.learn(2, 0, decode_ms / 1e3)
    alone_s = prompt_s = 0.0
    longest, granted = 0.0, 0
    for _ in range(3000):
        tokens = pace.budget(2)
        decode_s = decode_ms / 1e3 * (1 + noise * chance.uniform(-1, 1))
        spent_s = tokens * token_us / 1e6
        pace.learn(2, tokens, decode_s + spent_s)
        alone_s, prompt_s = alone_s + decode_s, prompt_s + spent_s
        longest, granted = max(longest, spent_s), granted + tokens
    portion_s = 16 * token_us / 1e6
    assert prompt_s <= slack * alone_s * (1 + noise) + 3 * portion_s
    if not noise:  # it hides what a token costs: then a single step may be longer, and the next ones pay
        assert longest <= max(portion_s, slack * decode_ms / 1e3) + 1e-9
    # Most of what could be had goes to the prompt.
    assert prompt_s >= (0.2 if noise else 0.8) * min(slack * alone_s, 3000 * 256 * token_us / 1e6) - portion_s
