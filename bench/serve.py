"""A driver's side of the line protocol: one JSON object a line, in and out. Standard library only.

    ← {"ready": {…}} or {"error": "…"}      once
    → {"op": NAME, …arguments}              ← {"ok": result} or {"error": "…"}

Drivers run in a peer's own venv, where nothing of ours is installed. Whatever a library prints goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Op = Callable[..., Any]


def serve(open_subject: Callable[[], tuple[Mapping[str, object], Mapping[str, Op]]]) -> None:
    """Opens the subject, says how it is, and answers until stdin closes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: object) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        about, ops = open_subject()
    except Exception as error:  # noqa: BLE001 (a process boundary)
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": dict(about)})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say({"ok": ops[request.pop("op")](**request)})
        except Exception as error:  # noqa: BLE001
            say({"error": f"{type(error).__name__}: {error}"})


def prompt(seed: int, num_tokens: int, vocab_size: int = 49152) -> list[int]:
    """Ordinary token ids, the same for the same seed; no two seeds share a prefix."""
    # SplitMix64's increment and shifts, shortened: no library, the same in every venv.
    low = min(1000, vocab_size // 4)  # special tokens and bytes come first
    ids, state = [], (seed * 0x9E3779B97F4A7C15 + 1) & (1 << 64) - 1
    for _ in range(num_tokens):
        state = (state + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        ids.append(low + (mixed >> 32) % (vocab_size - low))
    return ids


class Pace:
    """Times decode steps: begins when every sequence has `num_warm` tokens, ends with the first that is
    done."""

    def __init__(self, batch: int, num_warm: int, num_steps: int) -> None:
        self._counts = [0] * batch
        self._num_warm = num_warm
        self._last = num_warm + num_steps
        self._begun: tuple[float, int] | None = None
        self.seconds = 0.0
        self.num_tokens = 0

    @property
    def done(self) -> bool:
        """Whether the figure is there."""
        return self.seconds > 0.0

    def saw(self, news: Sequence[tuple[int, int]]) -> None:
        """One step's (sequence, number of new tokens)."""
        now = time.perf_counter()
        for index, count in news:
            self._counts[index] += count
        total = sum(self._counts)
        if self._begun is None and min(self._counts) >= self._num_warm:
            self._begun = (now, total)
        elif self._begun is not None and not self.done and max(self._counts) >= self._last:
            self.seconds = now - self._begun[0]
            self.num_tokens = total - self._begun[1]
