"""Batch size and memory (M15): throughput and TPOT against 1–64 requests, paged and contiguous.

    python -m bench.batch [--quick] [--out FOLDER] [--json FILE]

The source says that past a batch of 32 it degrades because of fragmentation. The same scheduler and the same
kernels run on two memories of one size: paged blocks, and one run of blocks a request for the most tokens it
declared (`bench.contiguous`). The pool is small enough that contiguous memory is full before 64 requests.
With `--out` the curves are drawn into `FOLDER/batch.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from bench import machine
from bench.driver import Driver
from bench.harness import Claim, Options, Report, Sheet, main_of, row_of
from bench.stats import NotRun, Samples, alternate, estimate
from bench.subjects import engine_environment, model_directory

PAGED, CONTIGUOUS = "paged", "contiguous"
_NUM_BLOCKS = 640
"""Of 16 tokens: about 30 requests at the declared maxima of `bench.closed_loop`, 100 at their real sizes."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    batches: tuple[int, ...]
    num_warm: int
    num_steps: int
    num_rounds: int


FULL = Sizes((1, 2, 4, 8, 16, 24, 32, 40, 48, 64), 60, 150, 3)
QUICK = Sizes((1, 16, 32, 64), 15, 40, 2)

Point = dict[str, float]
_SCATTERED = Claim("decode B32 at 256, blocks all over the pool", "tok/s", "scattered", "in a row", aim=0.95)


class Curve:
    """All that was measured: for each allocator and batch a point a round."""

    def __init__(self) -> None:
        self.points: dict[tuple[str, int], list[Point]] = {}

    def rates(self) -> Samples:
        """Tokens a second by "allocator at batch"."""
        values = {
            f"{allocator} at {batch}": [point["tokens_per_s"] for point in points]
            for (allocator, batch), points in self.points.items()
        }
        return Samples(values)

    def median(self, allocator: str, batch: int, what: str) -> float:
        """Over the rounds."""
        return estimate([point[what] for point in self.points[allocator, batch]]).value


def measure(options: Options, console: Console) -> Report:
    """The curve, whether scattered blocks cost anything, and the rows that say what holds."""
    sizes = QUICK if options.quick else FULL
    threads = (options.threads or (machine.num_cores(),))[0]
    model = model_directory()
    command = [sys.executable, "-m", "bench.drivers.batch", model, str(threads), str(_NUM_BLOCKS)]
    num_rounds = options.rounds or sizes.num_rounds
    try:
        with closing(Driver("batch", command, engine_environment(model, threads))) as driver:
            curve = _curve(driver, sizes, num_rounds, console)
            scatter = _scatter(driver, max(num_rounds, 3))
    except NotRun as why:
        claims = [*_claims(sizes.batches), _SCATTERED]
        return Report([row_of(c, Samples({}, {c.ours: str(why), c.reference: str(why)})) for c in claims])
    report = Report(sheets=[_sheet(curve, sizes, threads)])
    report.rows += [row_of(claim, curve.rates()) for claim in _claims(sizes.batches)]
    report.rows.append(row_of(_SCATTERED, scatter))
    if options.out:
        # Here: the drawing library takes its time to import.
        from bench.batch_plot import draw

        draw(_drawn(curve, sizes.batches), options.out / "batch.png", machine.line(machine.describe()))
        report.notes.append(f"curves: {options.out / 'batch.png'}")
    return report


def _curve(driver: Driver, sizes: Sizes, num_rounds: int, console: Console) -> Curve:
    curve = Curve()
    for number in range(num_rounds):
        for batch in sizes.batches:
            for allocator in (PAGED, CONTIGUOUS) if number % 2 else (CONTIGUOUS, PAGED):
                with console.status(f"round {number + 1}: {allocator} at {batch}"):
                    point: Point = driver.call(
                        "point", allocator=allocator, batch=batch, num_warm=sizes.num_warm,
                        num_steps=sizes.num_steps, seed=number * 1000 + batch,
                    )  # fmt: skip
                curve.points.setdefault((allocator, batch), []).append(point)
    return curve


def _scatter(driver: Driver, num_rounds: int) -> Samples:
    def rate(scattered: bool) -> float:
        found = driver.call("decode", batch=32, context=256, num_steps=12, scattered=scattered)
        return float(found["num_tokens"] / found["seconds"])

    return alternate({"scattered": partial(rate, True), "in a row": partial(rate, False)}, num_rounds)


def _claims(batches: tuple[int, ...]) -> list[Claim]:
    most = batches[-1]
    past = f"throughput at {most}"
    return [
        # The source: past 32 it degrades. What paged blocks should move, and what they move it against.
        Claim(f"{PAGED}: {past}", "tok/s", f"{PAGED} at {most}", f"{PAGED} at 32", aim=1.0),
        Claim(f"{CONTIGUOUS}: {past}", "tok/s", f"{CONTIGUOUS} at {most}", f"{CONTIGUOUS} at 32"),
        Claim(past, "tok/s", f"{PAGED} at {most}", f"{CONTIGUOUS} at {most}", aim=1.0),
        Claim("throughput at 32", "tok/s", f"{PAGED} at 32", f"{CONTIGUOUS} at 32"),
    ]


_COLUMNS = ("tok/s", "TPOT ms", "running", "filled", "reserved, empty", "free, stranded")
_FIELDS = ("tokens_per_s", "tpot_ms", "running", "filled", "reserved", "stranded")


def _sheet(curve: Curve, sizes: Sizes, threads: int) -> Sheet:
    lines: list[tuple[str | float, ...]] = []
    for allocator in (PAGED, CONTIGUOUS):
        for batch in sizes.batches:
            figures = [curve.median(allocator, batch, what) for what in _FIELDS]
            shares = (f"{share:.0%}" for share in figures[3:])
            lines.append((allocator, str(batch), *figures[:3], *shares))
    title = f"requests at a time, {threads}T, pool of {_NUM_BLOCKS} blocks"
    note = "shares of the pool; stranded: free while somebody waits for memory"
    return Sheet(title, ("memory", "requests", *_COLUMNS), lines, note)


def _drawn(curve: Curve, batches: tuple[int, ...]) -> Mapping[str, Mapping[str, list[float]]]:
    return {
        allocator: {
            "batch": [float(batch) for batch in batches],
            **{what: [curve.median(allocator, batch, what) for batch in batches] for what in _FIELDS},
        }
        for allocator in (PAGED, CONTIGUOUS)
    }


if __name__ == "__main__":
    main_of("batch", __doc__, measure)
