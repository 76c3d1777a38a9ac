"""One child over its restarts, with processes that only pretend, and time as an argument."""

from __future__ import annotations

import pytest

from diptych.cli.member import Change, Member
from diptych.cli.process import describe_exit, without_frames
from diptych.cli.supervision import State
from diptych.domain.errors import StoreUnavailable


class Pretended:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self.where: str | None = None
        self.calls: list[str] = []

    def exit_status(self) -> int | None:
        return self.status

    def address(self) -> str | None:
        return self.where

    def last_lines(self, count: int = 5) -> list[str]:
        return [f"last words of {self.pid}"]

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.fixture
def started() -> list[Pretended]:
    return []


@pytest.fixture
def member(started: list[Pretended]) -> Member:
    def launch() -> Pretended:
        started.append(Pretended(100 + len(started)))
        return started[-1]

    return Member("decode-0", "decode", launch)


def test_a_child_is_started_noticed_reaped_and_started_again(
    member: Member, started: list[Pretended]
) -> None:
    assert list(member.tick(0.0)) == []
    assert (member.state, member.pid, member.is_running) == (State.STARTING, 100, True)

    started[0].where = "127.0.0.1:9"
    assert list(member.tick(0.1)) == [Change("decode-0", "ready on 127.0.0.1:9 (pid 100)")]
    assert list(member.tick(0.2)) == []

    started[0].status = -9
    assert list(member.tick(1.0)) == [Change("decode-0", "was killed by SIGKILL; starting it again in 0.2 s")]
    assert (member.state, member.pid, member.is_running) == (State.DOWN, 0, False)
    assert member.last_words == ["last words of 100"]
    assert member.address == "127.0.0.1:9"

    assert list(member.tick(1.1)) == []
    assert len(started) == 1
    assert list(member.tick(1.3)) == []
    assert (member.pid, member.supervision.num_restarts) == (101, 1)


def test_a_process_that_is_ready_and_gone_between_two_looks_is_gone(
    member: Member, started: list[Pretended]
) -> None:
    list(member.tick(0.0))
    started[0].where, started[0].status = "127.0.0.1:9", 1
    (change,) = member.tick(0.1)
    assert change.what == "ended with status 1; starting it again in 0.2 s"
    assert member.state is State.DOWN


@pytest.mark.parametrize("error", [StoreUnavailable("no store"), FileNotFoundError("no file")])
def test_a_launch_that_fails_is_tried_again(error: Exception, started: list[Pretended]) -> None:
    outcomes: list[Exception | Pretended] = [error, Pretended(7)]

    def launch() -> Pretended:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    member = Member("store", "store", launch)
    assert list(member.tick(0.0)) == [Change("store", "could not be started; starting it again in 0.2 s")]
    assert member.last_words == [str(error)]
    assert list(member.tick(0.2)) == []
    assert member.pid == 7


def test_ending_reaches_the_process_that_there_is(member: Member, started: list[Pretended]) -> None:
    member.terminate()
    member.kill()
    list(member.tick(0.0))
    member.terminate()
    member.kill()
    assert started[0].calls == ["terminate", "kill"]


def test_of_a_traceback_only_the_error_is_quoted() -> None:
    log = (
        "settings: {}\n\nTraceback (most recent call last):\n  File 'x', line 1\n    call()\n    ^^^^\n"
        "ImportError: no x\n  indented, but no frame\n"
    )
    assert without_frames(log) == ["settings: {}", "ImportError: no x", "  indented, but no frame"]


def test_exits_in_words() -> None:
    assert describe_exit(0) == "ended with status 0"
    assert describe_exit(-15) == "was killed by SIGTERM"
    assert describe_exit(-250) == "was killed by signal 250"
