"""What the fast profile costs in sameness and in quality, and that the exact one costs none of either.

    python -m bench.divergence [--quick] [--only hop|quality] [--text FILE] [--json FILE]

**Hop.** The same prompts, greedy, through a system whose prompts all cross from a prefill worker to a
decode worker, and through a worker that does both: how many continuations differ, and after how many equal
tokens the first difference comes. Colocated against itself shows what batching alone does to the last bits.
**Quality.** Text through decode steps in each weight format, against fp32: see `bench.quality`. The text is
this repository's own prose, unless another is given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from bench import quality, subjects
from bench.continuations import Comparison, compare, continuations, prompts, prose
from bench.harness import Claim, Options, Report, Row, Sheet, main_of, row_of
from bench.quality import REFERENCE, Quality
from bench.stats import NotRun, Samples
from bench.system import started
from diptych.cli.assemble import UpOptions

_QUALITY_AIMS = {"bf16": 1.01, "int4": 1.05}
"""Most of fp32's perplexity."""
_COLUMNS = ("continuations", "against", "differ", "rate", "first at token", "median")


@dataclass(frozen=True, slots=True)
class Case:
    """A way to compute, with as many requests at a time."""

    name: str
    profile: str
    parallel: int
    weights: str = "bf16"
    must_be_equal: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    cases: tuple[Case, ...]
    num_prompts: int
    num_tokens: int
    num_batches: int
    num_forced: int


_EXACT = Case("exact", "exact", 1, must_be_equal=True)
_EXACT_BATCHED = Case("exact, 8 at a time", "exact", 8, must_be_equal=True)
_FAST = Case("fast", "fast", 1)
_FAST_BATCHED = Case("fast, 8 at a time", "fast", 8)
_INT4 = Case("fast, int4", "fast", 1, "int4")
FULL = Sizes((_EXACT, _EXACT_BATCHED, _FAST, _FAST_BATCHED, _INT4), 50, 64, 4, 192)
QUICK = Sizes((_EXACT, _FAST_BATCHED), 10, 16, 1, 48)


def measure(options: Options, console: Console) -> Report:
    """Both parts, or the one that is asked for."""
    sizes = QUICK if options.quick else FULL
    report = Report()
    directory = Path(subjects.model_directory())
    ids = prose(directory, options.text)
    if options.only in ("", "hop"):
        _hop(report, directory, prompts(ids, sizes.num_prompts), sizes, console)
    if options.only in ("", "quality"):
        with console.status("quality"):
            found = quality.measured(directory, ids, sizes.num_batches, sizes.num_forced)
        _tell_quality(report, found)
    report.notes.append(f"load average at the end: {os.getloadavg()[0]:.1f}")
    return report


def _hop(
    report: Report, directory: Path, asked: Sequence[Sequence[int]], sizes: Sizes, console: Console
) -> None:
    lines: list[tuple[str | float, ...]] = []
    for case in sizes.cases:
        with console.status(case.name):
            try:
                against_itself, over_the_hop = _compared(case, directory, asked, sizes.num_tokens)
            except NotRun as why:
                report.rows.append(_not_run(case, str(why)))
                continue
        lines.append(against_itself.line(case.name, "colocated, twice"))
        lines.append(over_the_hop.line(case.name, "colocated, apart"))
        report.rows.append(_row(case, over_the_hop, against_itself))
    title = f"{sizes.num_prompts} prompts of 17 to 400 tokens, {sizes.num_tokens} greedy tokens each"
    report.sheets.append(Sheet(title, _COLUMNS, lines))


def _compared(
    case: Case, directory: Path, asked: Sequence[Sequence[int]], num_tokens: int
) -> tuple[Comparison, Comparison]:
    """Colocated against itself, and against the hop."""
    ask = partial(continuations, asked=asked, num_tokens=num_tokens, parallel=case.parallel)
    options = UpOptions(str(directory), case.profile, num_prefill=0, num_decode=0, num_both=1)
    with started(options, DIPTYCH_WEIGHTS=case.weights) as system:
        together, again = (system.run(ask(system, path="local")) for _ in range(2))
    options = UpOptions(str(directory), case.profile, threshold_tokens=0)
    with started(options, DIPTYCH_WEIGHTS=case.weights) as system:
        apart = system.run(ask(system, path="disaggregated"))
    return compare(again, together), compare(apart, together)


def _row(case: Case, ours: Comparison, reference: Comparison) -> Row:
    aim = 1.0 if case.must_be_equal else None
    equal, base = ours.equal_share, reference.equal_share
    met = equal >= 1.0 if case.must_be_equal else None
    ratio = equal / base if base else None
    return Row(_named(case), "share", equal, base, "colocated twice", ratio, aim=aim, met=met, num_rounds=1)


def _not_run(case: Case, why: str) -> Row:
    met = False if case.must_be_equal else None
    aim = 1.0 if case.must_be_equal else None
    return Row(_named(case), "share", None, None, "colocated twice", None, aim=aim, met=met, why=why)


def _named(case: Case) -> str:
    return f"continuations that are equal over the hop, {case.name}"


def _tell_quality(report: Report, found: dict[str, Quality]) -> None:
    samples = Samples({name: one.perplexities for name, one in found.items()})
    for name, aim in _QUALITY_AIMS.items():
        claim = Claim(f"perplexity, {name} decode weights", "a token", name, REFERENCE, "lower", aim)
        report.rows.append(row_of(claim, samples))
    num_positions = len(found[REFERENCE].divergence)
    columns = ("weights", "perplexity", "KL from fp32, nats", "its 99th percentile", "same likeliest token")
    title = (
        f"{num_positions} positions of text, each predicted by a decode step in a batch of {quality.BATCH}"
    )
    report.sheets.append(Sheet(title, columns, [one.line(name) for name, one in found.items()]))


if __name__ == "__main__":
    main_of("divergence", __doc__, measure)
