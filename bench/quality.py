"""How far the formats of decode weights are from fp32: perplexity, and the next token's distribution.

Windows of text are forced through decode steps, as many at a time as a small batch has, in fp32 and in each
format side by side; prompts are prefilled before, in the format that prefill has. Figures are over positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from diptych.domain.ids import BlockId, RequestId
from diptych.domain.plan import SequenceStep, StepPlan
from diptych.domain.sampling import SamplingParams
from diptych.engine.settings import EngineSettings, Profile, Weights

if TYPE_CHECKING:
    import torch

    from diptych.engine.runner import TorchRunner

BATCH = 8
_PREFILLED = 64
_GREEDY = SamplingParams(max_tokens=1)
REFERENCE = "fp32"
FORMATS = {
    REFERENCE: (Profile.EXACT, Weights.BF16),
    "bf16": (Profile.FAST, Weights.BF16),
    "int4": (Profile.FAST, Weights.INT4),
}


@dataclass(slots=True)
class Quality:
    """One format's figures: of each position, of each window."""

    window_nats: list[float] = field(default_factory=list)
    """Mean negative log-likelihood of a window's tokens."""
    divergence: list[float] = field(default_factory=list)
    """Kullback-Leibler divergence from fp32's next-token distribution, in nats."""
    agrees: list[bool] = field(default_factory=list)
    """Whether the likeliest token is fp32's."""

    @property
    def perplexities(self) -> list[float]:
        """Of each window."""
        return [float(np.exp(nats)) for nats in self.window_nats]

    def line(self, name: str) -> tuple[str | float, ...]:
        """For a table."""
        whole = float(np.exp(np.mean(self.window_nats)))
        mean, high = float(np.mean(self.divergence)), float(np.quantile(self.divergence, 0.99))
        return name, whole, mean, high, f"{np.mean(self.agrees):.1%}"


def measured(directory: Path, ids: Sequence[int], num_batches: int, num_forced: int) -> dict[str, Quality]:
    """Quality by format, over `num_batches` × `BATCH` windows of `ids`, as far as those reach."""
    size = _PREFILLED + num_forced
    windows = [list(ids[i : i + size]) for i in range(0, len(ids) - size + 1, size)]
    windows = windows[: num_batches * BATCH]
    runners = {name: _opened(directory, name, size) for name in FORMATS}
    found = {name: Quality() for name in FORMATS}
    for first in range(0, len(windows) - BATCH + 1, BATCH):
        _force(runners, windows[first : first + BATCH], found)
    return found


def _opened(directory: Path, name: str, size: int) -> TorchRunner:
    from diptych.engine.runner import open_torch_runner

    profile, weights = FORMATS[name]
    num_blocks = BATCH * -(-size // 16)
    return open_torch_runner(EngineSettings(str(directory), profile, weights, num_blocks=num_blocks))


def _force(
    runners: dict[str, TorchRunner], windows: Sequence[Sequence[int]], found: dict[str, Quality]
) -> None:
    """One batch of windows through all formats."""
    for runner in runners.values():
        for row, window in enumerate(windows):  # one by one: a prompt's chunk is no decode step
            runner.logits(StepPlan((_step(row, window, 0, _PREFILLED),)))
    nats: dict[str, list[NDArray[np.float64]]] = {name: [] for name in runners}
    for position in range(_PREFILLED, len(windows[0]) - 1):
        plan = StepPlan(tuple(_step(row, window, position, 1) for row, window in enumerate(windows)))
        chosen = [window[position + 1] for window in windows]
        logs = {name: _log_probabilities(runner.logits(plan)) for name, runner in runners.items()}
        reference = logs[REFERENCE]
        for name, log in logs.items():
            nats[name].append(-log[np.arange(len(chosen)), chosen])
            found[name].divergence += (np.exp(reference) * (reference - log)).sum(-1).tolist()
            found[name].agrees += (log.argmax(-1) == reference.argmax(-1)).tolist()
    for name, steps in nats.items():
        found[name].window_nats += np.mean(steps, axis=0).tolist()


def _step(row: int, window: Sequence[int], start: int, num_tokens: int) -> SequenceStep:
    blocks = -(-len(window) // 16)
    table = [BlockId(block) for block in range(row * blocks, (row + 1) * blocks)]
    tokens = window[start : start + num_tokens]
    return SequenceStep(RequestId(str(row)), tokens, start, (table,), _GREEDY)


def _log_probabilities(logits: torch.Tensor | None) -> NDArray[np.float64]:
    assert logits is not None
    values: NDArray[np.float64] = logits.double().log_softmax(-1).numpy()
    return values
