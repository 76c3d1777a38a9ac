"""Where one step's time goes: torch's operators by group, compiled kernels and Python around them.

Two looks at the same step, since torch's profiler sees its own operators only: that one gives each operator
group's self time; `cProfile` gives the self time of our own functions, in which compiled kernels run. What is
left of the wall clock is the interpreter, or the profilers themselves.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import PurePath

from torch.profiler import ProfilerActivity, profile

_GROUPS = {
    "linear": ("linear", "mkldnn", "addmm", "aten::mm", "int4pack", "int8pack"),
    "attention": ("scaled_dot_product", "flash", "bmm", "baddbmm", "softmax", "matmul"),
    "gather and scatter": ("index", "gather", "scatter", "embedding", "take"),
    "sampling": ("argmax", "topk", "sort", "multinomial", "cumsum"),
    "copies and casts": ("copy", "_to_copy", "cat", "clone", "contiguous", "zeros", "fill", "empty"),
}
_OWN = "diptych"


def group_of(operator: str) -> str:
    """The group of an operator's name."""
    for group, words in _GROUPS.items():
        if any(word in operator for word in words):
            return group
    return "other operators"


class Profiler:
    """Profiles a step that may be repeated."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step

    def profile(self, num_steps: int) -> dict[str, object]:
        """{"step_ms": wall clock without profilers, "parts": [[name, ms a step], …], longest first}."""
        for _ in range(3):
            self._step()
        begun = time.perf_counter()
        self._repeat(num_steps)
        step_ms = (time.perf_counter() - begun) * 1e3 / num_steps
        parts = {**self._operators(num_steps), **self._own_functions(num_steps)}
        rest = step_ms - sum(parts.values())
        parts["rest (interpreter)"] = max(rest, 0.0)
        return {"step_ms": step_ms, "parts": sorted(parts.items(), key=lambda part: -part[1])}

    def _repeat(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _operators(self, num_steps: int) -> dict[str, float]:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            self._repeat(num_steps)
        groups: defaultdict[str, float] = defaultdict(float)
        for event in seen.key_averages():
            groups[f"torch: {group_of(event.key)}"] += event.self_cpu_time_total / 1e3 / num_steps
        return dict(groups)

    def _own_functions(self, num_steps: int) -> dict[str, float]:
        """Self time of our functions. Operators are calls out of them and don't count here."""
        seen = cProfile.Profile()
        seen.runcall(self._repeat, num_steps)
        found: defaultdict[str, float] = defaultdict(float)
        stats = pstats.Stats(seen).stats  # type: ignore[attr-defined]
        for (file, _, function), (_, _, self_s, _, _) in stats.items():
            parts = PurePath(file).parts
            if _OWN in parts:
                found[f"ours: {PurePath(file).stem}.{function}"] += self_s * 1e3 / num_steps
        large = {name: ms for name, ms in found.items() if ms >= 0.05}
        large["ours: smaller functions"] = sum(found.values()) - sum(large.values())
        return large
