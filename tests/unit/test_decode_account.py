"""What a decode worker says that it holds: its engine's part, and for whom its I/O process holds it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from diptych.domain.audit import MAX_OF_A_KIND, Held
from diptych.domain.engine_report import EngineLoad
from services.decode.account import joined
from services.decode.deliveries import Delivery

LOAD = EngineLoad(1, 0, 4, 0, 4, 8, 0, 4, held=[Held("request", "a", "", 3.0, 4)], num_held=1)


def delivery(name: str, *, running: bool = True, attached: bool = True, until: float = math.inf) -> Delivery:
    """As much of one as an account looks at."""
    session = object() if attached else None
    told = SimpleNamespace(
        request_id=name, is_running=running, session=session, router=("router-0", 7), until=until, since=4.0
    )
    return cast("Delivery", told)


def test_a_request_belongs_to_the_router_that_wants_it() -> None:
    assert joined(LOAD, [delivery("a")], 10.0) == ([Held("request", "a", "router-0", 3.0, 4)], 1)


def test_one_whose_router_is_gone_ends_by_itself() -> None:
    held, _ = joined(LOAD, [delivery("a", attached=False, until=40.0)], 10.0)
    assert held == [Held("request", "a", "router-0 (left)", 3.0, 4, 30.0)]


def test_one_that_no_delivery_knows_belongs_to_nobody() -> None:
    assert joined(LOAD, [], 10.0) == (LOAD.held, 1)


def test_one_that_the_engine_does_not_know_is_told_apart() -> None:
    held, total = joined(LOAD, [delivery("a"), delivery("b")], 10.0)
    assert held[1:] == [Held("delivery", "b", "router-0", 6.0)]
    assert total == 2


def test_where_the_engines_list_is_cut_nothing_is_said_to_be_unknown() -> None:
    cut = replace(LOAD, num_held=2)
    held, total = joined(cut, [delivery("a"), delivery("b")], 10.0)
    assert ([one.name for one in held], total) == (["a"], 2)


def test_a_last_word_waits_for_its_acknowledgement() -> None:
    held, total = joined(LOAD, [delivery("a"), delivery("z", running=False, until=110.0)], 10.0)
    assert held[1:] == [Held("last word", "z", "router-0", 6.0, ends_in_s=100.0)]
    assert total == 2


@pytest.mark.parametrize("running", [True, False])
def test_the_list_is_bounded(running: bool) -> None:
    many = [delivery(str(number), running=running, until=99.0) for number in range(3 * MAX_OF_A_KIND)]
    held, total = joined(LOAD, many, 10.0)
    assert (len(held), total) == (1 + MAX_OF_A_KIND, 1 + 3 * MAX_OF_A_KIND)
