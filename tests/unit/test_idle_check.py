"""An idle engine looks whether anything belongs to nobody: it counts, says so once, and goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from diptych.domain.engine_report import EngineLoad
from diptych.domain.errors import Internal
from diptych.domain.ids import Attempt, RequestId
from diptych.domain.sampling import SamplingParams
from diptych.worker.integrity import EVERY_S, QUIET_S, IdleCheck
from services.decode.effects import ReadKey
from services.decode.loop import DecodeLoop
from services.prefill.loop import PrefillLoop
from services.prefill.messages import AttemptKey
from tests.support.pair_rig import PairRig

PROMPT = [(7 * i + i * i % 31) % 256 for i in range(300)]


class Books:
    """Something to check."""

    def __init__(self) -> None:
        self.wrong = ""
        self.error: type[Exception] = Internal
        self.check = IdleCheck(self._look, lambda: 3)

    def _look(self) -> None:
        if self.wrong:
            raise self.error(self.wrong)


@pytest.fixture
def rig() -> Iterator[PairRig]:
    rig = PairRig()
    yield rig
    rig.close()


def serve_one(rig: PairRig) -> None:
    rig.submit("a", PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    rig.pump()
    assert rig.finishes["a"][0].trail.path == "disaggregated"


def idle_for(rig: PairRig, seconds: float) -> None:
    """A first turn notices that nothing is live, one after that time looks."""
    rig.step()
    rig.clock.now += seconds
    rig.step()


def empty_load() -> EngineLoad:
    return EngineLoad(0, 0, 0, 0, 0, 0, 0, 0, counters={"preempted": 2})


def test_it_looks_after_a_quiet_moment_and_then_now_and_again() -> None:
    check = Books().check
    for now, num_checks in (
        (10.0, 0),
        (10.0 + QUIET_S / 2, 0),
        (10.0 + QUIET_S, 1),
        (10.0 + QUIET_S + EVERY_S / 2, 1),
        (10.0 + QUIET_S + EVERY_S, 2),
    ):
        check.turn(True, now)
        assert check.num_checks == num_checks


def test_work_puts_it_off() -> None:
    check = Books().check
    check.turn(True, 10.0)
    check.turn(False, 10.0 + QUIET_S)
    check.turn(True, 10.1 + QUIET_S)
    assert check.num_checks == 0


@pytest.mark.parametrize("error", [Internal, KeyError, ValueError])
def test_what_it_finds_is_told_once_and_counted(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    books = Books()
    books.wrong, books.error = "block 7", error
    books.check.turn(True, 0.0)
    books.check.turn(True, QUIET_S)
    books.check.turn(True, QUIET_S + EVERY_S)
    assert books.check.num_checks == 2
    told = books.check.told(empty_load())
    assert told.counters == {"preempted": 2, "leaked_blocks": 3}
    assert "block 7" in told.leak
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "block 7" in caplog.text


def test_what_is_mended_is_no_finding_any_more() -> None:
    books = Books()
    books.wrong = "block 7"
    books.check.turn(True, QUIET_S)
    books.check.turn(True, 2 * QUIET_S)
    assert books.check.finding
    books.wrong = ""
    books.check.turn(True, 2 * QUIET_S + EVERY_S)
    assert books.check.told(empty_load()) == empty_load()


def test_a_sound_pair_finds_nothing(rig: PairRig) -> None:
    serve_one(rig)
    idle_for(rig, QUIET_S)
    loops: list[DecodeLoop | PrefillLoop] = [rig.decode, *rig.prefills]
    assert [loop.idle_check.num_checks for loop in loops] == [1, 1]
    assert [loop.idle_check.finding for loop in loops] == ["", ""]
    assert "leaked_blocks" not in rig.decode.load().counters


def test_a_live_request_is_no_leak(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    rig.submit("a", PROMPT, SamplingParams(max_tokens=4))
    rig.pump(lambda: bool(rig.jobs))
    idle_for(rig, QUIET_S)
    assert rig.decode.idle_check.num_checks == 0
    rig.cancel("a")
    rig.pump()
    rig.assert_empty()


def test_blocks_that_decode_lost_are_counted_and_the_worker_serves_on(rig: PairRig) -> None:
    lost = rig.decode._pools.pools[0].allocate(5)
    serve_one(rig)
    idle_for(rig, QUIET_S)
    load = rig.decode.load()
    assert load.counters["leaked_blocks"] == 5
    assert "do not add up" in load.leak
    rig.submit("b", PROMPT[:5], SamplingParams(max_tokens=2, ignore_eos=True))
    rig.pump()
    assert len(rig.tokens["b"]) == 2
    rig.decode._pools.pools[0].release(lost)
    idle_for(rig, QUIET_S)
    assert rig.decode.load().leak == ""


def test_a_landing_slot_that_nobody_reads_into_is_a_leak(rig: PairRig) -> None:
    assert rig.decode._ring.take(ReadKey(RequestId("gone"), Attempt(1), 0, 0), 0.0, 1.0) is not None
    idle_for(rig, QUIET_S)
    assert rig.decode.load().counters["leaked_blocks"] == 1
    assert "1 landing slots" in rig.decode.load().leak


def test_blocks_that_prefill_lost_are_counted(rig: PairRig) -> None:
    [prefill] = rig.prefills
    prefill._pools.pools[0].allocate(2)
    idle_for(rig, QUIET_S)
    assert prefill._load().counters["leaked_blocks"] == 2


def test_a_send_slot_without_a_reader_is_a_leak(rig: PairRig) -> None:
    [prefill] = rig.prefills
    assert prefill._rings[0].take((AttemptKey(RequestId("gone"), Attempt(1)), 0), 0.0, 1e9) is not None
    idle_for(rig, QUIET_S)
    assert prefill.idle_check.num_leaked == 1
    assert "do not mirror" in prefill._load().leak
