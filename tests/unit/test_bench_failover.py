"""The arithmetic of `bench.failover`: what counts as held, as a pause, as met."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.failover import AIM, KINDS, report_aborts, report_gaps, report_store
from bench.failover_abort import Aborts
from bench.failover_costs import StoreCosts
from bench.failover_gap import Gap, Stream
from bench.harness import Report, Row
from bench.holdings import held_for, state_of
from bench.stats import quantile
from diptych.domain.audit import Held
from diptych.domain.ids import Epoch, WorkerId
from diptych.rpc.inspection import Account

IDLE = Account(WorkerId("w"), Epoch(1), 0, 0, (8, 0, 0, 8), (0, 4), (), 0, 0, "", 0.1, (), 0.0, {})


def kinds(*held: Held) -> list[str]:
    return [one.kind for one in held_for(replace(IDLE, held=held), "r1")]


def test_all_of_a_request_counts_and_nothing_of_another_with_a_longer_name() -> None:
    assert kinds(
        Held("request", "r1"), Held("stream", "r1/1"), Held("chunk", "r1/1 chunk 0", "cache, decode"),
        Held("request", "r10"), Held("attempt", "r10/1"),
    ) == ["request", "stream", "chunk"]  # fmt: skip


def test_what_is_kept_on_purpose_does_not_count() -> None:
    assert kinds(Held("last word", "r1", "router-0"), Held("chunk", "r1/1 chunk 0", "cache")) == []


@pytest.mark.parametrize(
    ("held", "has_token", "state"),
    [
        ([], False, "queued"),
        ([Held("job", "r")], False, "queued"),
        ([Held("attempt", "r/1")], False, "queued"),
        ([Held("attempt", "r/1", num_blocks=3)], False, "prefilling"),
        ([Held("attempt", "r/1", num_blocks=3), Held("read", "r/1 chunk 0")], False, "reading"),
        ([Held("request", "r", num_blocks=3)], True, "decoding"),
    ],
)
def test_how_far_a_request_is(held: list[Held], has_token: bool, state: str) -> None:
    assert state_of(held, has_token) == state


def test_a_pause_is_the_longest_that_ended_after_the_kill() -> None:
    stream = Stream(0.0, [5.0, 5.1, 5.2, 6.0, 6.1])
    assert stream.ttft_s == 5.0
    assert stream.pause(5.15) == pytest.approx(0.8)  # the first 5 s were before it
    assert Gap(0.8, 0.3).beyond_s == pytest.approx(0.5)
    assert Gap(0.2, 0.3).beyond_s == 0.0


def test_a_quantile_never_flatters() -> None:
    assert quantile([float(i) for i in range(1, 101)], 0.99).value == 100.0
    assert quantile([1.0, 9.0], 0.99).value == 9.0
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.99)


def rows(report: Report) -> dict[str, Row]:
    return {row.name: row for row in report.rows}


def test_only_the_tail_has_an_aim_and_one_slow_abort_misses_it() -> None:
    aborts, report = Aborts(gaps=[0.005]), Report()
    aborts.by_state["decoding"] = [0.02, 0.02, 0.02]
    aborts.by_state["reading"] = [0.15]
    report_aborts(report, aborts, "toy")
    middle, tail = rows(report).values()
    assert (middle.aim, middle.met) == (None, None)
    assert (tail.ours, tail.reference, tail.reference_name, tail.met) == (150.0, 100.0, AIM, False)
    assert [line[:2] for line in report.sheets[0].lines] == [("reading", 1.0), ("decoding", 3.0)]


def test_a_router_that_is_started_again_has_no_aim() -> None:
    report = Report()
    report_gaps(report, [Gap(2.0, 0.0)], KINDS["alone"], "toy")
    report_gaps(report, [Gap(0.7, 0.6)], KINDS["decode"], "toy")
    assert [row.met for row in report.rows] == [None, None, None, True]


def test_store_calls_that_grow_with_the_output_are_a_miss() -> None:
    report = Report()
    report_store(report, StoreCosts({"fcall": 6.0, "hset": 9.0}, 1.0), StoreCosts({"fcall": 9.0}, 1.0))
    [row] = report.rows
    assert (row.ours, row.reference, row.met) == (9.0, 6.0, False)
