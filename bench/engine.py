"""The engine on this CPU, beside vLLM, llama.cpp and transformers: prompts, decodes, and what the loop costs.

    python -m bench.engine [--quick] [--threads N …] [--json FILE] [--only prefill|decode]

Ours is measured *through the worker's real loop*: the engine process of a `--role both` worker, spoken to
over its socket pair. "bare step" is the same runner called with ready-made plans; what the loop adds to it is
a row of its own. Peers are called without their servers, which would cost them a core they don't have.
All subjects sit idle in their own processes and take turns, so that a noisy neighbour hits all alike.

Decode figures: greedy, every sequence at `context` when it begins; prompts are prefilled outside of the
clock. `--quick` takes one thread count, few sizes, and leaves out transformers and llama.cpp's 4-bit formats.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from bench import machine, subjects
from bench.driver import Driver
from bench.engine_limits import Limits, ModelCost, measured_limits, model_cost, usage_sheet
from bench.harness import Claim, Options, Report, Sheet, main_of, row_of
from bench.stats import NotRun, Samples, alternate
from bench.subjects import BARE, HF, LLAMA, OURS, OURS_AUTO, VLLM, Subject

_LOOP_AIM = 1.05
_FEW = 8
"""Rows up to which `--weights auto` decodes on 4-bit layers; more are bf16, as without it."""
_PREFILL_AIMS = {VLLM: (0.9, 1.0)}
_DECODE_AIMS: dict[int, dict[str, tuple[float | None, float | None]]] = {
    1: {VLLM: (1.2, None), LLAMA["BF16"]: (0.9, None), LLAMA["Q4_0"]: (None, 0.8)},
    16: {VLLM: (1.0, 1.1)},
    32: {VLLM: (1.0, 1.1)},
}
"""(accepted from, stretch) by batch and reference."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    num_steps: int
    num_rounds: int
    references: tuple[str, ...]


FULL = Sizes((512, 2048), (1, 8, 16, 32), (256, 1024), 32, 5, (VLLM, *LLAMA.values(), HF))
QUICK = Sizes((512,), (1, 16), (256,), 16, 3, (VLLM, LLAMA["BF16"]))


def measure(options: Options, console: Console) -> Report:
    """All thread counts, one after the other."""
    sizes = QUICK if options.quick else FULL
    most = machine.num_cores()
    threads = options.threads or ((most,) if options.quick else tuple(sorted({1, most})))
    model = subjects.model_directory()
    report = Report()
    for count in threads:
        names = [OURS, OURS_AUTO, BARE, *sizes.references]
        with subjects.opened(model, count, names, console) as opened:
            _Bench(sizes, options, count, opened, console).run(report)
    report.notes.append(f"load average at the end: {os.getloadavg()[0]:.1f} on {most} cores")
    return report


@dataclass(frozen=True, slots=True)
class _Bench:
    """One thread count."""

    sizes: Sizes
    options: Options
    threads: int
    opened: dict[str, Subject]
    console: Console

    def run(self, report: Report) -> None:
        limits, cost = measured_limits(self.threads), model_cost(subjects.model_directory())
        usage = [
            self._prefill(report, num_tokens, limits, cost)
            for num_tokens in self._wanted("prefill", self.sizes.prompts)
        ]
        usage += [
            self._decode(report, batch, context, limits, cost)
            for context in self.sizes.contexts
            for batch in self._wanted("decode", self.sizes.batches)
        ]
        report.sheets.append(usage_sheet(self.threads, limits, usage))
        report.sheets += self._profiles()

    def _wanted(self, kind: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes if self.options.only in ("", kind) else ()

    def _prefill(
        self, report: Report, num_tokens: int, limits: Limits, cost: ModelCost
    ) -> tuple[str | float, ...]:
        name = f"prefill {num_tokens}, {self.threads}T"
        samples = self._alternate(name, lambda subject: subject.prefill(num_tokens), {}, (OURS_AUTO,))
        for reference in self.sizes.references:
            aim, stretch = _PREFILL_AIMS.get(reference, (None, None))
            claim = Claim(name, "tok/s", OURS, reference, aim=aim, stretch=stretch)
            report.rows.append(row_of(claim, samples))
        return cost.prefill_usage(name, num_tokens, samples.values.get(OURS, []), limits)

    def _decode(
        self, report: Report, batch: int, context: int, limits: Limits, cost: ModelCost
    ) -> tuple[str | float, ...]:
        name = f"decode B{batch} at {context}, {self.threads}T"
        steps = self.sizes.num_steps
        slow = dict.fromkeys(LLAMA.values(), 1) if batch > 1 else {}
        left_out = () if batch <= _FEW else (OURS_AUTO,)
        samples = self._alternate(name, lambda subject: subject.decode(batch, context, steps), slow, left_out)
        aims = _DECODE_AIMS.get(batch, {})
        for mine in (OURS, OURS_AUTO) if batch <= _FEW else (OURS,):
            for reference in self.sizes.references:
                aim, stretch = aims.get(reference, (None, None))
                claim = Claim(
                    name if mine == OURS else f"{name}, 4-bit layers", "tok/s", mine, reference,
                    aim=aim, stretch=stretch,
                )  # fmt: skip
                report.rows.append(row_of(claim, samples))
        loop = Claim(name.replace("decode", "loop,"), "ms a step", OURS, BARE, "lower", _LOOP_AIM)
        report.rows.append(row_of(loop, step_times(samples, batch)))
        return cost.decode_usage(name, batch, context, samples.values.get(OURS, []), limits)

    def _alternate(
        self, name: str, rate: Callable[[Subject], float], slow: dict[str, int], left_out: tuple[str, ...]
    ) -> Samples:
        measures = {
            shown: partial(rate, subject) for shown, subject in self.opened.items() if shown not in left_out
        }
        with self.console.status(name):
            return alternate(measures, self.options.rounds or self.sizes.num_rounds, slow)

    def _profiles(self) -> list[Sheet]:
        subject = self.opened[BARE]
        if not isinstance(subject, subjects.Driven):
            return []
        context = self.sizes.contexts[-1]
        found = [
            _profile(subject.driver, f"decode step, B{batch} at {context}, {self.threads}T", "profile",
                     batch=batch, context=context)
            for batch in (self.sizes.batches[0], self.sizes.batches[-1])
        ]  # fmt: skip
        last = self.sizes.prompts[-1]
        title = f"prefill, last 256 of {last}, {self.threads}T"
        return [*found, _profile(subject.driver, title, "profile_prefill", num_tokens=last)]


def step_times(samples: Samples, batch: int) -> Samples:
    """Tokens a second of a batch, as milliseconds a step."""
    values = {name: [1e3 * batch / rate for rate in rates] for name, rates in samples.values.items()}
    return Samples(values, samples.failures)


def _profile(driver: Driver, title: str, op: str, **arguments: int) -> Sheet:
    try:
        found = driver.call(op, num_steps=10, **arguments)
    except NotRun as why:
        return Sheet(title, ("part", "ms", "share"), [], f"not run: {why}")
    total = found["step_ms"]
    lines: list[tuple[str | float, ...]] = [
        (name, ms, f"{ms / total:.0%}") for name, ms in found["parts"] if ms >= 0.005 * total
    ]
    return Sheet(f"{title}: {total:.2f} ms", ("part", "ms", "share"), lines)


if __name__ == "__main__":
    main_of("engine", __doc__, measure)
