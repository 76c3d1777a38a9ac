"""The hand-off as a transaction: how fast an abort settles, how long a death is felt, and what it costs.

    python -m bench.failover [--quick] [--json FILE] [--only toy|real|abort|gap|cost]

- *abort*: a client goes away while its request is queued, prefilled, read or decoded; the time until neither
  its prefill nor its decode worker holds anything for it.
- *gap*: the decode worker, the prefill worker or the router of a stream is killed (SIGKILL); the longest
  pause that its client sees, beyond the time of one prefill of that prompt.
- *cost*: digests as a share of the hand-off, and calls of the store a request.

Two prefill and two decode workers of a `diptych up`, with the toy model (20 ms a step: the mechanics alone)
and with the real one. `--quick` takes few samples of each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from rich.console import Console
from rich.progress import Progress

from bench.failover_abort import STATES, Aborts, Prompts, measure_aborts
from bench.failover_costs import HandoffCosts, StoreCosts, handoff_costs, store_costs
from bench.failover_gap import Gap, Gaps
from bench.harness import Options, Report, Row, Sheet, main_of
from bench.stats import Estimate, estimate, quantile
from bench.system import System, started
from diptych.cli.assemble import UpOptions
from diptych.rpc.dial import Dialer

SETTLED_MS: Final = 100.0
GAP_MS: Final = 1000.0
AIM: Final = "aim"
SHORT, LONG = 4, 64
"""Output tokens of the two kinds of requests whose store calls are compared."""
TOKEN_PATH_AIM: Final = 1.25
KINDS: Final = {
    "decode": "decode worker killed",
    "prefill": "prefill worker killed",
    "router": "router killed, another takes over",
    "alone": "router killed, started again",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model, the prompts that it is given, and what its children are told."""

    name: str
    prompts: Prompts
    environment: dict[str, str]


TOY: Final = Model("toy", Prompts(600, 1500, 256), {"DIPTYCH_TOY_STEP_DELAY_S": "0.02"})
REAL: Final = Model("smollm2-135m", Prompts(500, 1000, 49152), {"DIPTYCH_NUM_BLOCKS": "1024"})


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many samples of each."""

    num_aborts: dict[str, int]
    num_gaps: dict[str, int]
    num_handoffs: int
    num_requests: int


FULL: Final = Sizes({"toy": 300, "smollm2-135m": 150}, {"toy": 15, "smollm2-135m": 15}, 12, 100)
QUICK: Final = Sizes({"toy": 40, "smollm2-135m": 30}, {"toy": 2, "smollm2-135m": 2}, 4, 30)


def measure(options: Options, console: Console) -> Report:
    """Both models, one after the other."""
    sizes, report = QUICK if options.quick else FULL, Report()
    for model, word in ((TOY, "toy"), (REAL, "real")):
        if options.only in ("", word, "abort", "gap", "cost"):
            with started(UpOptions(model.name, num_prefill=2, num_decode=2), **model.environment) as system:
                _Bench(system, model, word, sizes, options.only, console).run(report)
    return report


@dataclass(frozen=True, slots=True)
class _Bench:
    """One model's system."""

    system: System
    model: Model
    word: str
    sizes: Sizes
    only: str
    console: Console

    def run(self, report: Report) -> None:
        if self._wanted("abort"):
            report_aborts(report, self._aborts(), self.word)
        if self._wanted("cost"):
            self._costs(report)
        if self._wanted("gap"):
            for kind, shown in KINDS.items():
                if gaps := self._gaps(kind):
                    report_gaps(report, gaps, shown, self.word)

    def _wanted(self, what: str) -> bool:
        return self.only in ("", self.word, what)

    def _aborts(self) -> Aborts:
        total = self.sizes.num_aborts[self.model.name]
        with Progress(console=self.console, transient=True) as progress:
            task = progress.add_task(f"aborts, {self.word}", total=total)
            return self.system.run(
                measure_aborts(
                    self.system, total, self.model.prompts, lambda done: progress.update(task, completed=done)
                )
            )

    def _gaps(self, kind: str) -> list[Gap]:
        if kind != "router":
            return self.system.run(self._kill(kind, self.system.router))
        with self.system.second_router() as other:
            return self.system.run(self._kill(kind, f"{self.system.router},{other}"))

    async def _kill(self, kind: str, routers: str) -> list[Gap]:
        total, shown = self.sizes.num_gaps[self.model.name], f"{KINDS[kind]}, {self.word}"
        async with Dialer() as dialer:
            gaps = Gaps(self.system, dialer, routers, self.model.prompts)
            kills: dict[str, Callable[[], Awaitable[Gap]]] = {
                "decode": gaps.decode, "prefill": gaps.prefill, "router": gaps.router, "alone": gaps.router,
            }  # fmt: skip
            try:
                with Progress(console=self.console, transient=True) as progress:
                    return [await kills[kind]() for _ in progress.track(range(total), description=shown)]
            finally:
                await gaps.close()

    def _costs(self, report: Report) -> None:
        prompts, status = self.model.prompts, self.console.status(f"costs, {self.word}")
        with status:
            if self.model is REAL:
                costs = self.system.run(handoff_costs(self.system, self.sizes.num_handoffs, prompts))
                report_digests(report, costs)
                return
            short, long = (
                self.system.run(store_costs(self.system, self.sizes.num_requests, num_tokens, prompts))
                for num_tokens in (SHORT, LONG)
            )
            report_store(report, short, long)


def report_aborts(report: Report, aborts: Aborts, word: str) -> None:
    """Rows of the whole, and a line for each state."""
    for q in (0.5, 0.99):
        name = f"abort settled on both sides p{100 * q:.0f}, {word}"
        report.rows.append(_against(name, aborts.all, q, SETTLED_MS, has_aim=q > 0.5))
    lines: list[tuple[str | float, ...]] = [
        (state, float(len(times)), 1e3 * median(times), 1e3 * quantile(times, 0.99).value, 1e3 * max(times))
        for state in STATES
        if (times := aborts.by_state.get(state))
    ]
    gap = 1e3 * median(aborts.gaps)
    note = f"A question took {gap:.1f} ms (median): a figure is too long by one at most, never too short"
    columns = ("cancelled while", "samples", "p50 ms", "p99 ms", "longest ms")
    report.sheets.append(Sheet(f"aborts by state, {word}", columns, lines, note))


def report_gaps(report: Report, gaps: Sequence[Gap], shown: str, word: str) -> None:
    """Rows of what goes beyond one prefill; the whole pauses beside them."""
    beyond = [gap.beyond_s for gap in gaps]
    for q in (0.5, 0.99):
        name = f"gap p{100 * q:.0f}: {shown}, {word}"
        # A router that has to be started is no failover: how long that takes is told, and nothing promised.
        has_aim = q > 0.5 and shown != KINDS["alone"]
        report.rows.append(_against(name, beyond, q, GAP_MS, has_aim))
    pauses, prefills = [gap.pause_s for gap in gaps], [gap.prefill_s for gap in gaps]
    report.notes.append(
        f"{shown}, {word}: the whole pause was {1e3 * median(pauses):.0f} ms (median of {len(gaps)}, longest "
        f"{1e3 * max(pauses):.0f}), one prefill {1e3 * median(prefills):.0f} ms"
    )


def report_digests(report: Report, costs: HandoffCosts) -> None:
    """How much of the hand-off is digests."""
    handoff, digests, share = map(estimate, (costs.handoff, costs.digest, costs.shares))
    report.rows.append(
        Row(
            "digests of a hand-off, real", "ms", 1e3 * digests.value, 1e3 * handoff.value, "the hand-off",
            share.value, "lower", None, None, None, _ms(digests), _ms(handoff), (share.low, share.high),
            len(costs.handoff),
        )
    )  # fmt: skip
    size = costs.num_bytes / len(costs.handoff) / (1 << 20)
    report.notes.append(
        f"digests: {share.value:.1%} of a hand-off of {size:.1f} MiB, of which "
        f"{1e3 * median(costs.exposed):.1f} ms are not hidden behind the prefill"
    )


def report_store(report: Report, short: StoreCosts, long: StoreCosts) -> None:
    """Calls of the store a request, and that they do not grow with its output."""
    ratio = long.sent / short.sent
    report.rows.append(
        Row(
            f"store calls, {LONG} tokens of output", "calls a request", long.sent, short.sent,
            f"{SHORT} tokens", ratio, "lower", TOKEN_PATH_AIM, ratio <= TOKEN_PATH_AIM, None,
            ratio_interval=(ratio, ratio), num_rounds=1,
        )
    )  # fmt: skip
    names = [name for name, _ in sorted(long.by_command.items(), key=lambda entry: -entry[1])]
    lines: list[tuple[str | float, ...]] = [
        (name, short.by_command.get(name, 0.0), long.by_command[name]) for name in names
    ]
    note = (
        f"Those that functions run inside of one call are counted too. By itself the system runs "
        f"{long.idle_per_s:.0f} a second (signs of life, looks at the registry), taken off here. "
        f"The claim of a job, which waits for it, is not among them: one a request"
    )
    columns = ("command of the store, a request", f"{SHORT} tokens", f"{LONG} tokens")
    report.sheets.append(Sheet("store", columns, lines, note))


def _against(name: str, seconds: Sequence[float], q: float, bound_ms: float, has_aim: bool) -> Row:
    """A quantile in ms against what was promised of it."""
    found = quantile(seconds, q)
    low, high = _ms(found)
    ratio = 1e3 * found.value / bound_ms
    return Row(
        name, "ms", 1e3 * found.value, bound_ms, AIM, ratio, "lower",
        1.0 if has_aim else None, ratio <= 1.0 if has_aim else None, None,
        (low, high), None, (low / bound_ms, high / bound_ms), len(seconds),
    )  # fmt: skip


def _ms(found: Estimate) -> tuple[float, float]:
    return 1e3 * found.low, 1e3 * found.high


if __name__ == "__main__":
    main_of("failover", __doc__, measure)
