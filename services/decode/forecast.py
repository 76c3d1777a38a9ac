"""How long a hand-off takes, learnt from those that came to their end (pure)."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2


@dataclass(slots=True)
class HandoffForecast:
    """Both are averages; 0: nothing is known yet."""

    wait_s: float = 0.0
    """From posting a job to its `Begin`: how busy the prefill workers are."""
    token_s: float = 0.0
    """From `Begin` until the KV is here, by prompt tokens."""

    def learn(self, wait_s: float, carried_s: float, num_tokens: int) -> None:
        """Takes in a hand-off that succeeded."""
        is_first = self.token_s == 0.0
        weight = 1.0 if is_first else _WEIGHT
        self.wait_s += weight * (wait_s - self.wait_s)
        self.token_s += weight * (carried_s / num_tokens - self.token_s)

    def handoff_s(self, num_tokens: int) -> float:
        """How long so many prompt tokens will take by way of a prefill worker; 0 while nothing is known."""
        return self.wait_s + num_tokens * self.token_s
