"""Who comes first, and whose prompt tokens a step takes: the rules that both brains share (pure).

**Places.** A lower priority number comes sooner, and waiting counts too: one step of priority is worth
`PRIORITY_STEP_S` seconds of it. A place is given once and never changes. So whoever came later by more than
the head start that priorities can give, `MOST_HEAD_START_S`, comes after: nobody waits for ever.

**Prompt tokens.** Every other turn belongs to the prompt that is first in order, the turns between to the
one with the fewest tokens left; what a turn's owner leaves goes to the others. So a short prompt waits for
one turn of a long one, a long prompt has at least half of all turns, and prompts of one length run one
after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

PRIORITY_STEP_S = 10.0
MOST_HEAD_START_S = 3600.0

Place = tuple[float, int]
"""Sorts: when it would have come with priority 0, in seconds, and the number of its arrival."""

T = TypeVar("T")


def place(priority: int, now: float, arrival: int) -> Place:
    """The place of what comes `now`, as number `arrival`."""
    head_start_s = max(-MOST_HEAD_START_S, min(MOST_HEAD_START_S, priority * PRIORITY_STEP_S))
    return now + head_start_s, arrival


class PromptTurns:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._is_shortest_s = False

    def sorted(self, prompts: Sequence[T], num_left: Callable[[T], int]) -> list[T]:
        """`prompts`, which come by their places, as this turn takes them. The next call is the next turn."""
        if len(prompts) < 2:
            return list(prompts)
        is_shortest_s, self._is_shortest_s = self._is_shortest_s, not self._is_shortest_s
        return sorted(prompts, key=num_left) if is_shortest_s else list(prompts)
