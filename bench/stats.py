"""Medians with bootstrap intervals, and runs that alternate so that a neighbour's noise hits all alike.

The interval is the percentile bootstrap of the median (Efron, 1979) at 95 %. With the three to seven rounds
that a benchmark affords it is about the range of the samples: honest, and no narrower than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_RESAMPLES = 4000
_LEVEL = 0.95


class NotRun(Exception):
    """Something could not be measured; the message says why, in a row's words."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its interval."""

    value: float
    low: float
    high: float


def estimate(samples: Sequence[float], seed: int = 0) -> Estimate:
    """The median of `samples` with its interval. Raises ValueError when there are none."""
    if not samples:
        raise ValueError("no samples")
    values = np.asarray(samples, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.quantile(medians, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Estimate(float(np.median(values)), float(low), float(high))


def quantile(samples: Sequence[float], q: float, seed: int = 0) -> Estimate:
    """The sample that no more than a part `1 - q` of them exceeds, with its bootstrap interval. Of fewer than
    `1 / (1 - q)` samples it is the largest. Raises ValueError when there are none."""
    if not samples:
        raise ValueError("no samples")
    values = np.asarray(samples, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    found = np.quantile(values[picks], q, axis=1, method="higher")
    low, high = np.quantile(found, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Estimate(float(np.quantile(values, q, method="higher")), float(low), float(high))


def ratio_of(ours: Sequence[float], reference: Sequence[float]) -> Estimate:
    """The ratio ours / reference, round by round; of all pairs where one had fewer rounds than the other."""
    if len(ours) == len(reference):
        return estimate([a / b for a, b in zip(ours, reference, strict=True)])
    return estimate([a / b for a in ours for b in reference])


@dataclass(slots=True)
class Samples:
    """What alternating runs gave: rounds by name, and for those that failed, why."""

    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def alternate(
    measures: Mapping[str, Callable[[], float]], num_rounds: int, slow: Mapping[str, int] | None = None
) -> Samples:
    """Runs every measure once a round, each round beginning with another one.

    `slow` names measures that take part in their first rounds only. One that raises NotRun is dropped from
    later rounds, and its samples with it.
    """
    limits = slow or {}
    found = Samples({name: [] for name in measures})
    names = list(measures)
    for number in range(num_rounds):
        first = number % len(names) if names else 0
        for name in [*names[first:], *names[:first]]:
            if name in found.failures or number >= limits.get(name, num_rounds):
                continue
            try:
                found.values[name].append(measures[name]())
            except NotRun as reason:
                found.failures[name] = str(reason)
                del found.values[name]
    return found
