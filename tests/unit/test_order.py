"""Places, and turns at a step's prompt tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.domain.order import MOST_HEAD_START_S, PRIORITY_STEP_S, PromptTurns, place


def test_lower_numbers_come_sooner_and_equal_ones_as_they_came() -> None:
    arrivals = [(0, 5), (1, 0), (2, -1), (3, 0), (4, -(2**31))]
    order = sorted((place(priority, 0.0, arrival), arrival) for arrival, priority in arrivals)
    assert [arrival for _, arrival in order] == [4, 2, 1, 3, 0]


def test_waiting_counts_for_a_step_of_priority() -> None:
    early = place(1, 100.0, 1)
    assert place(0, 100.0 + PRIORITY_STEP_S - 0.1, 2) < early < place(0, 100.0 + PRIORITY_STEP_S + 0.1, 3)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
def test_nobody_is_overtaken_for_ever(patient: int, urgent: int) -> None:
    assert place(patient, 0.0, 1) < place(urgent, 2 * MOST_HEAD_START_S + 1, 2)


def _turns_until(name: str, left: dict[str, int], budget: int) -> int:
    """Turns that pass until `name` has none left."""
    turns, left = PromptTurns(), dict(left)
    for turn in range(1, 1000):
        granted = budget
        for prompt in turns.sorted([n for n in left if left[n]], lambda n: left[n]):
            taken = min(granted, left[prompt])
            left[prompt] -= taken
            granted -= taken
        if not left[name]:
            return turn
    raise AssertionError(f"{name} starved")


def test_a_short_prompt_waits_for_one_turn_of_a_long_one() -> None:
    assert _turns_until("short", {"long": 10_000, "short": 20}, 256) == 2


def test_a_long_prompt_has_half_of_the_turns() -> None:
    many = {f"short {i}": 256 for i in range(500)}
    assert _turns_until("long", {"long": 2560, **many}, 256) <= 2 * 10


def test_prompts_of_one_length_run_one_after_another() -> None:
    pair = {"first": 2560, "second": 2560}
    assert _turns_until("first", pair, 256) == 10
    assert _turns_until("second", pair, 256) == 20
