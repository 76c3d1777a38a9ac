"""The alarm: calls in order of their time, on its own thread, and an end that leaves none."""

import gc
import logging
import threading
import time
import weakref

import pytest

from diptych.transfer.alarm import Alarm

WAIT_S = 30.0


@pytest.fixture
def alarm() -> Alarm:
    return Alarm("kv-test-alarm")


def test_calls_run_by_time_then_in_order_on_one_other_thread(alarm: Alarm) -> None:
    ran: list[tuple[int, threading.Thread]] = []
    last = threading.Event()
    now = time.monotonic()
    with_order = {3: now + 0.04, 1: now + 0.02, 2: now + 0.02, 4: now + 0.06}
    for number, when in with_order.items():
        alarm.at(when, lambda number=number: ran.append((number, threading.current_thread())))  # type: ignore[misc]
    alarm.at(now + 0.08, last.set)
    assert last.wait(WAIT_S)
    assert time.monotonic() >= now + 0.08
    assert [number for number, _ in ran] == [1, 2, 3, 4]
    (thread,) = {thread for _, thread in ran}
    assert thread is not threading.current_thread()
    alarm.close()
    assert not thread.is_alive()


def test_an_earlier_call_wakes_a_waiting_alarm(alarm: Alarm) -> None:
    early = threading.Event()
    alarm.at(time.monotonic() + 1000, pytest.fail)
    alarm.soon(early.set)
    assert early.wait(WAIT_S)
    alarm.close()


def test_a_cancelled_call_never_runs_and_keeps_nothing_alive(alarm: Alarm) -> None:
    class Thing:
        def touch(self) -> None:
            pytest.fail("was cancelled")

    thing = Thing()
    watch = weakref.ref(thing)
    call = alarm.at(time.monotonic() + 0.05, thing.touch)
    call.cancel()
    del thing
    gc.collect()
    assert watch() is None
    after = threading.Event()
    alarm.at(time.monotonic() + 0.06, after.set)
    assert after.wait(WAIT_S)
    alarm.close()


def test_close_runs_what_is_due_and_forgets_the_rest(alarm: Alarm) -> None:
    inside, go_on, ran = threading.Event(), threading.Event(), []

    def first() -> None:
        inside.set()
        go_on.wait(WAIT_S)
        alarm.soon(lambda: ran.append("due, from within"))

    alarm.soon(first)
    alarm.soon(lambda: ran.append("due"))
    alarm.at(time.monotonic() + 1000, lambda: ran.append("not due"))
    assert inside.wait(WAIT_S)
    closing = threading.Thread(target=alarm.close)
    closing.start()
    go_on.set()
    closing.join(WAIT_S)
    assert "due" in ran
    assert "not due" not in ran
    alarm.at(0.0, lambda: ran.append("too late"))
    alarm.close()
    assert "too late" not in ran


def test_a_failing_call_stops_no_other(alarm: Alarm, caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Event()
    alarm.soon(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    alarm.soon(ran.set)
    assert ran.wait(WAIT_S)
    alarm.close()
    assert [(record.levelno, record.exc_info is not None) for record in caplog.records] == [
        (logging.ERROR, True)
    ]
