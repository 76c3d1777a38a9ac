"""How many prompt tokens a step may carry beside running decodes (pure).

The budget keeps a step with local prefill within `slack` of a step without: at most +25 % ITL by default.
Both costs are learnt from the steps themselves, as exponential averages of the engine's own clock.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2


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

    def budget(self, num_decodes: int) -> int:
        """Prompt tokens for the next step."""
        if num_decodes == 0:
            return self.max_tokens
        if self.decode_step_s <= 0.0 or self.prefill_token_s <= 0.0:
            return self.min_tokens
        affordable = int(self.slack * self.decode_step_s / self.prefill_token_s)
        return max(self.min_tokens, min(self.max_tokens, affordable))

    def learn(self, num_decodes: int, num_prefill_tokens: int, elapsed_s: float) -> None:
        """Takes in how long a step took."""
        if num_prefill_tokens == 0:
            self.decode_step_s = _blend(self.decode_step_s, elapsed_s)
            return
        share = elapsed_s - (self.decode_step_s if num_decodes else 0.0)
        self.prefill_token_s = _blend(self.prefill_token_s, max(share, 0.0) / num_prefill_tokens)


def _blend(average: float, value: float) -> float:
    return value if average == 0.0 else average + _WEIGHT * (value - average)
