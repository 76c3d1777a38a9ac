"""How many prompt tokens a step may carry beside running decodes (pure).

Local prefill may lengthen the time between two tokens by `slack`, +25 % by default. Each step that decodes
earns that share of its own time, prompt tokens are paid for with what they took, and a step carries what
can be paid; where that is less than `min_tokens`, a few steps save for them. What is saved is bounded by
the price of one such portion, so that a prompt which comes after long quiet is no licence for a long step.

Prices are learnt from the steps themselves, as averages of the engine's own clock. A single step that took
many times longer than usual (the process was stopped, say) counts as a few times longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_WEIGHT = 0.2
_MOST = 4.0
"""A step counts for at most so many times its expected duration."""
_ROUNDED = 1 + 1e-9
"""What was saved for a portion must not fall short of it by a rounding."""
_LEAST_SLACK = 0.01
"""With no slack at all, a prompt would never end beside decodes that never do."""


@dataclass(slots=True)
class Pace:
    """What steps cost, and what the next one may carry."""

    slack: float
    min_tokens: int
    max_tokens: int
    decode_step_s: float = 0.0
    """Of a step that only decodes."""
    prefill_token_s: float = 0.0
    """What one prompt token adds to a step."""
    saved_s: float = 0.0
    """May be spent on prompt tokens; negative after a step that was longer than expected."""

    def budget(self, num_decodes: int) -> int:
        """Prompt tokens for the next step."""
        if num_decodes == 0:
            return self.max_tokens
        if self.decode_step_s <= 0.0 or self.prefill_token_s <= 0.0:
            return self.min_tokens
        affordable = self._tokens_for(self.saved_s + self._earned_s)
        if affordable < self.min_tokens:
            return 0
        return min(affordable, self.max_tokens, max(self.min_tokens, self._tokens_for(self._earned_s)))

    def learn(self, num_decodes: int, num_prefill_tokens: int, elapsed_s: float) -> None:
        """Takes in how long a step took. Prompt tokens alone say nothing of their price beside decodes."""
        if num_prefill_tokens == 0:
            self.decode_step_s = _blend(self.decode_step_s, elapsed_s)
            self._save(self._earned_s)
        elif num_decodes and self.decode_step_s > 0.0:
            expected_s = self.decode_step_s + num_prefill_tokens * self.prefill_token_s
            share_s = max(min(elapsed_s, _MOST * expected_s) - self.decode_step_s, 0.0)
            self.prefill_token_s = _blend(self.prefill_token_s, share_s / num_prefill_tokens, limit=math.inf)
            self._save(self._earned_s - share_s)

    def local_s(self, num_tokens: int, num_decodes: int) -> float:
        """How long so many prompt tokens will take beside so many decodes; 0 while prices are unknown."""
        alone_s = num_tokens * self.prefill_token_s
        if num_decodes == 0 or self.decode_step_s <= 0.0:
            return alone_s
        slack = max(self.slack, _LEAST_SLACK)
        return alone_s * (1 + slack) / slack

    @property
    def _earned_s(self) -> float:
        return max(self.slack, _LEAST_SLACK) * self.decode_step_s

    def _tokens_for(self, seconds: float) -> int:
        return int(seconds / self.prefill_token_s * _ROUNDED)

    def _save(self, seconds: float) -> None:
        self.saved_s = min(self.saved_s + seconds, self.min_tokens * self.prefill_token_s)


def _blend(average: float, value: float, limit: float = _MOST) -> float:
    if average == 0.0:
        return value
    return average + _WEIGHT * (min(value, limit * average) - average)
