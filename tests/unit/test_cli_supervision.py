"""Restart and back-off of children, with time as an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cli.supervision import FIRST_WAIT_S, HEALTHY_S, LONGEST_WAIT_S, State, Supervision
from diptych.domain.errors import Internal


def test_a_child_that_dies_at_its_start_waits_twice_as_long_each_time() -> None:
    child, now, waits = Supervision(), 0.0, []
    for _ in range(8):
        assert child.is_due(now)
        child.started()
        waits.append(child.exited(now))
        assert not child.is_due(now)
        now = child.restart_at
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    assert child.num_restarts == 7


@pytest.mark.parametrize(("healthy_s", "wait_s"), [(HEALTHY_S, FIRST_WAIT_S), (HEALTHY_S - 0.1, 0.8)])
def test_only_health_forgives(healthy_s: float, wait_s: float) -> None:
    child = Supervision()
    for _ in range(2):
        child.started()
        child.exited(0.0)
    child.started()
    child.ready(100.0)
    assert child.exited(100.0 + healthy_s) == pytest.approx(wait_s)


def test_long_in_starting_is_not_health() -> None:
    child = Supervision()
    child.started()
    child.exited(0.0)
    child.started()
    assert child.exited(1000.0) == pytest.approx(0.4)


def test_restarts_are_counted_not_the_first_start() -> None:
    child = Supervision()
    assert (child.state, child.num_restarts) == (State.DOWN, 0)
    child.started()
    child.ready(0.0)
    assert (child.state, child.num_restarts) == (State.READY, 0)
    child.exited(1.0)
    assert (child.state, child.num_restarts) == (State.DOWN, 0)
    child.started()
    assert child.num_restarts == 1


def test_events_out_of_order_are_bugs() -> None:
    child = Supervision()
    with pytest.raises(Internal, match="down"):
        child.ready(0.0)
    with pytest.raises(Internal, match="down"):
        child.exited(0.0)
    child.started()
    with pytest.raises(Internal, match="starting"):
        child.started()


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 60)), max_size=40))
def test_the_wait_stays_in_its_bounds_and_grows_unless_healthy(lives: list[tuple[bool, float]]) -> None:
    child, now, last = Supervision(), 0.0, 0.0
    for gets_ready, lasts_s in lives:
        now = max(now, child.restart_at)
        child.started()
        if gets_ready:
            child.ready(now)
        now += lasts_s
        wait_s = child.exited(now)
        assert FIRST_WAIT_S <= wait_s <= LONGEST_WAIT_S
        assert child.restart_at == now + wait_s
        if not (gets_ready and lasts_s > HEALTHY_S + 1e-3):
            assert wait_s >= last or lasts_s > HEALTHY_S - 1e-3
        else:
            assert wait_s == FIRST_WAIT_S
        last = wait_s
