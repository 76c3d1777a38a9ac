"""The benchmarks' common parts: rows, intervals, alternation, JSON and the summary."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import __main__ as all_benchmarks
from bench.harness import Claim, Options, Report, Row, Sheet, read_options, row_of, run, show, summary
from bench.machine import cpu_model, describe, line
from bench.stats import NotRun, Samples, alternate, estimate, ratio_of

SAMPLES = Samples({"ours": [110.0, 120.0, 130.0], "theirs": [100.0, 100.0, 100.0]}, {"gone": "not built"})


def claim(reference: str = "theirs", **more: object) -> Claim:
    return Claim("decode", "tok/s", "ours", reference, **more)  # type: ignore[arg-type]


def test_an_estimate_is_the_median_within_its_interval() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.value == 3.0
    assert 1.0 <= found.low <= found.value <= found.high <= 100.0
    assert estimate([5.0] * 7) == estimate([5.0])


def test_the_interval_narrows_with_more_rounds() -> None:
    few, many = estimate([9.0, 10.0, 11.0]), estimate([9.0, 10.0, 11.0] * 20)
    assert many.high - many.low < few.high - few.low


def test_rounds_are_paired_so_that_common_noise_cancels() -> None:
    """A neighbour halves both in the second round."""
    found = ratio_of([120.0, 60.0, 120.0], [100.0, 50.0, 100.0])
    assert (found.low, found.value, found.high) == pytest.approx((1.2, 1.2, 1.2))


def test_unequal_rounds_give_the_ratio_of_all_pairs() -> None:
    assert ratio_of([10.0, 20.0, 30.0], [10.0]).value == 2.0


def test_measures_alternate_and_each_begins_a_round() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return len(calls)

    found = alternate({n: lambda n=n: measure(n) for n in "abc"}, 3, {"c": 1})  # type: ignore[misc]
    assert "".join(calls) == "abc" + "ba" + "ab"
    assert [len(found.values[n]) for n in "abc"] == [3, 3, 1]


def test_a_measure_that_fails_is_dropped_and_says_why() -> None:
    rounds = iter([1.0, 2.0])

    def fails_later() -> float:
        value = next(rounds, None)
        if value is None:
            raise NotRun("out of memory")
        return value

    found = alternate({"ours": lambda: 1.0, "theirs": fails_later}, 4)
    assert found.values == {"ours": [1.0] * 4}
    assert found.failures == {"theirs": "out of memory"}


@pytest.mark.parametrize(
    ("better", "aim", "met"),
    [("higher", 1.2, True), ("higher", 1.21, False), ("lower", 1.2, True), ("lower", 1.19, False)],
)
def test_a_row_is_met_when_the_ratio_reaches_its_aim(better: str, aim: float, met: bool) -> None:
    row = row_of(claim(better=better, aim=aim), SAMPLES)
    assert row.ratio == pytest.approx(1.2)
    assert (row.ours, row.reference, row.num_rounds, row.why) == (120.0, 100.0, 3, "")
    assert row.met is met


def test_a_row_without_an_aim_is_neither_met_nor_missed() -> None:
    assert row_of(claim(), SAMPLES).met is None


@pytest.mark.parametrize(("reference", "why"), [("gone", "not built"), ("unknown", "not measured")])
def test_a_row_that_could_not_be_measured_says_why_and_is_not_met(reference: str, why: str) -> None:
    row = row_of(claim(reference, aim=0.5), SAMPLES)
    assert (row.reference, row.ratio, row.met) == (None, None, False)
    assert row.why == f"not run: {why}"
    assert row.ours == 120.0


def test_the_summary_counts_names_misses_and_what_was_not_run() -> None:
    rows = [
        row_of(claim(aim=1.0), SAMPLES),
        row_of(claim(aim=1.5), SAMPLES),
        row_of(claim("gone", aim=1.0), SAMPLES),
        row_of(claim(), SAMPLES),
    ]
    assert summary(rows) == "1 of 3 aims met; missed: decode 1.20× theirs (aim 1.5); 1 of 4 rows not run"


def test_a_run_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    console = Console(record=True, width=200)
    sheet = Sheet("profile", ("part", "ms"), [("linear", 7.25)])
    report = Report([row_of(claim(aim=1.0), SAMPLES)], [sheet], ["a note"])
    status = run({"toy": lambda options, _: report}, Options(quick=True, json=file), console)
    said = console.export_text().splitlines()
    document = json.loads(file.read_text(encoding="utf-8"))
    (row,) = document["rows"]
    assert status == 0
    assert said[-1].strip() == "1 of 1 aims met"
    assert any("linear" in text and "7.25" in text for text in said)
    assert {"name", "ours", "reference", "reference_name", "ratio", "better", "aim", "met"} <= row.keys()
    assert (row["ours"], row["met"], document["quick"]) == (120.0, True, True)
    assert document["machine"]["cores"] >= 1


def test_a_run_without_rows_fails() -> None:
    assert run({"toy": lambda *_: Report()}, Options(), Console(quiet=True)) == 1


def test_a_row_that_was_not_run_is_shown_with_its_reason() -> None:
    console = Console(record=True, width=200)
    show("toy", Report([row_of(claim("gone", aim=1.0), SAMPLES)]), console)
    said = console.export_text()
    assert "gone: not run: not built" in said
    assert "no" in said


def test_options_are_read() -> None:
    found = read_options(["--quick", "--threads", "1", "2", "--rounds", "9", "--only", "prefill"], "x", "doc")
    assert found == Options(True, None, None, (1, 2), 9, "prefill")


def test_the_machine_names_its_processor() -> None:
    assert cpu_model("processor: 0\nmodel name\t: A CPU @ 2 GHz\n") == "A CPU @ 2 GHz"
    assert cpu_model("nothing here") == "unknown CPU"
    assert "UTC" in line(describe())


def test_every_listed_benchmark_has_a_measure() -> None:
    modules = [__import__(f"bench.{name}", fromlist=["measure"]) for name in all_benchmarks.BENCHMARKS]
    assert all(callable(module.measure) for module in modules)


def test_rows_are_plain_data() -> None:
    row = row_of(claim(aim=1.0), SAMPLES)
    assert isinstance(row, Row)
    assert row.ratio_interval is not None
    assert row.ratio_interval[0] <= row.ratio_interval[1]  # type: ignore[index]
