"""Sampling parameters, and randomness as a function.

Randomness is counter-based: every draw is f(seed, choice, position, draw) and nothing else, so that a token
does not depend on its batch, its worker, or on what happened before a failover. `position` is the index of
the sampled token in prompt + output. The mixer is SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diptych.domain.errors import InvalidField

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, choice: int, position: int, draw: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, fixed by its four arguments."""
    bits = _mix(_mix(_mix(_mix(seed & _MASK) ^ choice) ^ position) ^ draw)
    return (bits >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Names and meaning are vLLM's and OpenAI's."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all of the vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def check(self, vocab_size: int) -> None:
        """Raises InvalidField for the first field that is out of its bounds."""
        _bounded("max_tokens", self.max_tokens, 1, 1 << 24)
        _bounded("temperature", self.temperature, 0.0, 100.0)
        _bounded("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidField("top_p", "must be above 0 and at most 1, is 0")
        _bounded("top_k", self.top_k, 0, vocab_size)
        _bounded("min_p", self.min_p, 0.0, 1.0)
        _bounded("seed", self.seed, 0, _MASK)
        _bounded("min_tokens", self.min_tokens, 0, self.max_tokens)
        if len(self.stop) > 16:
            raise InvalidField("stop", f"at most 16 strings, there are {len(self.stop)}")
        for i, text in enumerate(self.stop):
            if not text or len(text) > 1024:
                raise InvalidField(f"stop[{i}]", f"must have 1 to 1024 characters, has {len(text)}")
        if len(self.stop_token_ids) > 64:
            raise InvalidField("stop_token_ids", f"at most 64 ids, there are {len(self.stop_token_ids)}")
        for i, token in enumerate(self.stop_token_ids):
            _bounded(f"stop_token_ids[{i}]", token, 0, vocab_size - 1)


def _bounded(field: str, value: float, low: float, high: float) -> None:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidField(field, f"must be from {low:g} to {high:g}, is {value:g}")
