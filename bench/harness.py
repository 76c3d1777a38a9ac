"""What all benchmarks share: rows that set our figure beside another's, their table, their JSON, one summary.

A row with an `aim` is met when the ratio of ours to the reference reaches it (for "lower" figures: stays
under it). A row that could not be measured says why, and is not met. The last printed line is the summary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.stats import Estimate, Samples, estimate, ratio_of

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. `aim` and `stretch` are bounds of `ratio`; None: nothing was promised."""

    name: str
    unit: str
    ours: float | None
    reference: float | None
    reference_name: str
    ratio: float | None
    better: Better = "higher"
    aim: float | None = None
    met: bool | None = None
    stretch: float | None = None
    ours_interval: tuple[float, float] | None = None
    reference_interval: tuple[float, float] | None = None
    ratio_interval: tuple[float, float] | None = None
    num_rounds: int = 0
    why: str = ""
    """Why there is no figure."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a row compares, before it is measured. `ours` and `reference` name measures of one `Samples`."""

    name: str
    unit: str
    ours: str
    reference: str
    better: Better = "higher"
    aim: float | None = None
    stretch: float | None = None


def row_of(claim: Claim, samples: Samples) -> Row:
    """The claim with its figures, or with the reason why there are none."""
    values, failures = samples.values, samples.failures
    ours = estimate(values[claim.ours]) if values.get(claim.ours) else None
    reference = estimate(values[claim.reference]) if values.get(claim.reference) else None
    ratio: Estimate | None = None
    if ours and reference:
        ratio = ratio_of(values[claim.ours], values[claim.reference])
    missing = [failures.get(name, "not measured") for name in (claim.ours, claim.reference)
               if not values.get(name)]  # fmt: skip
    return Row(
        claim.name, claim.unit, _value(ours), _value(reference), claim.reference,
        _value(ratio), claim.better, claim.aim, _met(claim, ratio), claim.stretch,
        _interval(ours), _interval(reference), _interval(ratio),
        len(values.get(claim.ours, ())), f"not run: {'; '.join(missing)}" if missing else "",
    )  # fmt: skip


def _met(claim: Claim, ratio: Estimate | None) -> bool | None:
    if claim.aim is None:
        return None
    if ratio is None:
        return False
    return ratio.value >= claim.aim if claim.better == "higher" else ratio.value <= claim.aim


def _value(value: Estimate | None) -> float | None:
    return value.value if value else None


def _interval(value: Estimate | None) -> tuple[float, float] | None:
    return (value.low, value.high) if value else None


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table beside the rows: a profile, a curve."""

    title: str
    columns: tuple[str, ...]
    lines: list[tuple[str | float, ...]]
    note: str = ""


@dataclass(slots=True)
class Report:
    """All that a benchmark found."""

    rows: list[Row] = field(default_factory=list)
    sheets: list[Sheet] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Options:
    """`out` is where plots go; None: draw none."""

    quick: bool = False
    json: Path | None = None
    out: Path | None = None
    threads: tuple[int, ...] | None = None
    """Thread counts to measure; None: the benchmark's own."""
    rounds: int | None = None
    only: str = ""
    """Only what has this in its name."""
    text: Path | None = None
    """Text for benchmarks that need some; None: the repository's own."""


def read_options(arguments: Sequence[str], prog: str, doc: str) -> Options:
    """The flags that all benchmarks take."""
    parser = argparse.ArgumentParser(prog=prog, description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="draw plots into this folder")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="thread counts to measure")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of every paired run")
    parser.add_argument("--only", default="", metavar="TEXT", help="only what has this in its name")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to use instead of our own")
    found = parser.parse_args(arguments)
    threads = tuple(found.threads) if found.threads else None
    return Options(found.quick, found.json, found.out, threads, found.rounds, found.only, found.text)


Measure = Callable[[Options, Console], Report]


def run(measures: dict[str, Measure], options: Options, console: Console | None = None) -> int:
    """Runs benchmarks, prints and writes what they found. Exit status 0 unless none of the rows is there."""
    console = console or _console()
    here = machine.describe()
    console.print(machine.line(here), soft_wrap=True, highlight=False)
    report = Report()
    for name, measure in measures.items():
        found = measure(options, console)
        show(name, found, console)
        report.rows += found.rows
        report.sheets += found.sheets
        report.notes += found.notes
    if options.json:
        document = {"machine": here, "quick": options.quick, **asdict(report)}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(summary(report.rows), soft_wrap=True, highlight=False)
    return 0 if report.rows else 1


def _console() -> Console:
    """Wide enough for the tables where the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def main_of(name: str, doc: str, measure: Measure) -> None:
    """The `__main__` of a benchmark that runs alone."""
    options = read_options(sys.argv[1:], f"python -m bench.{name}", doc)
    sys.exit(run({name: measure}, options))


def summary(rows: Sequence[Row]) -> str:
    """One line: how many aims are met, which are missed and by what, and how many rows were not run."""
    aimed = [row for row in rows if row.aim is not None]
    missed = [row for row in aimed if not row.met and row.ratio is not None]
    not_run = sum(bool(row.why) for row in rows)
    text = f"{sum(bool(row.met) for row in aimed)} of {len(aimed)} aims met"
    if missed:
        named = (f"{row.name} {row.ratio:.2f}× {row.reference_name} (aim {row.aim:g})" for row in missed)
        text += f"; missed: {', '.join(named)}"
    return text + (f"; {not_run} of {len(rows)} rows not run" if not_run else "")


def show(name: str, report: Report, console: Console) -> None:
    """Prints a report."""
    table = Table("row", "ours", "reference", "ratio", "aim", "met", title=name, title_justify="left")
    for row in report.rows:
        table.add_row(*_cells(row))
    console.print(table)
    for sheet in report.sheets:
        grid = Table(*sheet.columns, title=sheet.title, title_justify="left", caption=sheet.note)
        for entries in sheet.lines:
            grid.add_row(*(f"{e:.4g}" if isinstance(e, float) else str(e) for e in entries))
        console.print(grid)
    for note in report.notes:
        console.print(note, soft_wrap=True, highlight=False)


def _cells(row: Row) -> tuple[str, ...]:
    aim = "" if row.aim is None else f"{'≥' if row.better == 'higher' else '≤'} {row.aim:g}"
    aim += f" ({row.stretch:g})" if row.stretch is not None else ""
    met = {True: "[green]yes", False: "[red]no", None: ""}[row.met]
    if row.why:
        ours = _figure(row.ours, row.ours_interval)
        return row.name, ours, f"{row.reference_name}: {row.why}", "", aim, met
    reference = f"{_figure(row.reference, row.reference_interval)} {row.reference_name}"
    ratio = _figure(row.ratio, row.ratio_interval, ".2f")
    return f"{row.name}, {row.unit}", _figure(row.ours, row.ours_interval), reference, ratio, aim, met


def _figure(value: float | None, interval: tuple[float, float] | None, form: str = ".4g") -> str:
    if value is None:
        return "–"
    return f"{value:{form}} \\[{interval[0]:{form}}–{interval[1]:{form}}]" if interval else f"{value:{form}}"
