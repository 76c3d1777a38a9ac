"""Every service killed, stopped and failed at each point of a request's way, on one running system.

After each: a greedy and a seeded client have their whole answers, those of an undisturbed run, or one clear
error where the point itself raised one; everybody is back; nothing is left, by `diptych audit`'s own rules.
What is stopped stays so until the clients have their answers: nobody waits for it.

By default each point is passed once, with the actions in turn; `DIPTYCH_MATRIX=all` runs every case.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

import pytest

from diptych.domain.errors import Internal, Stale
from tests.support.disturbance import Disturbance
from tests.support.matrix import Answer, System

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

POINTS = {
    "router": (
        "received", "admitted", "placed", "submit", "write", "deltas", "last_word", "answered", "cancel",
        "attach", "attached",
    ),
    "decode": (
        "submitted", "posted", "begin", "begun", "handoff", "chunk", "manifest", "landed", "tokens",
        "last_word", "cancel", "attach",
    ),
    "prefill": ("claimed", "begun", "engine_begun", "chunk", "manifest", "released", "done", "over"),
    "cache": ("offer", "admitted", "read", "offered", "lend", "lent", "give_back", "given_back"),
}  # fmt: skip
SECOND_DEATHS = ("decode.attach", "router.attach", "router.attached")
ACTIONS = ("kill", "stop", "error")
STORE_POINTS = (
    "router.admitted", "decode.submitted", "decode.posted", "prefill.claimed", "prefill.begun",
    "prefill.chunk", "cache.read", "decode.last_word",
)  # fmt: skip
"""Whoever passes the point is held while something is done to the store."""
STORE_ACTIONS = ("kill", "stop", "error", "flush")
ENGINE_POINTS = ("prefill.begun", "prefill.chunk", "decode.submitted", "decode.tokens")
"""Whoever passes the point is held while something is done to its engine process."""
ENGINE_ACTIONS = ("kill", "stop")


@dataclass(frozen=True, slots=True)
class Case:
    """`victim`: "self" is whoever passes the point."""

    point: str
    victim: str
    action: str

    def __str__(self) -> str:
        return f"{self.point}-{self.victim}-{self.action}"


def table(points: tuple[str, ...], victim: str, actions: tuple[str, ...]) -> list[Case]:
    """All of them, or each point once with the actions in turn."""
    if os.environ.get("DIPTYCH_MATRIX") == "all":
        return [Case(point, victim, action) for action in actions for point in points]
    return [Case(point, victim, actions[i % len(actions)]) for i, point in enumerate(points)]


TABLES = [
    *(table(tuple(f"{role}.{p}" for p in points), "self", ACTIONS) for role, points in POINTS.items()),
    table(STORE_POINTS, "store", STORE_ACTIONS),
    table(ENGINE_POINTS, "engine", ENGINE_ACTIONS),
]
# The roles take turns: who was killed is back, and in good standing with `up`, before it is killed again.
CASES = [case for row in zip_longest(*TABLES) for case in row if case is not None]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("matrix")) as system:
        yield system


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_failure(system: System, case: Case) -> None:
    system.settle()
    with Disturbance(system, case.point, case.victim, case.action) as disturbance:
        # Who has just come back is not known everywhere yet: ask until the point was passed.
        for _ in range(20):
            check(system, case, drive(system, case))
            if disturbance.has_happened(within_s=1.0):
                break
        assert disturbance.has_happened(within_s=20.0), f"{case.point} was never passed"
    system.settle()


def drive(system: System, case: Case) -> list[Answer]:
    """Has requests take the way on which the point lies."""
    service, _, step = case.point.partition(".")
    if step == "cancel":
        return system.ask_all(num_tokens=2)
    if step in ("attach", "attached"):
        return system.ask_all(after_first=once(lambda: system.kill("router-0")))
    if service == "cache" and step in ("lend", "lent", "give_back", "given_back"):
        return system.ask_all(system.fill_cache())
    return system.ask_all()


def check(system: System, case: Case, answers: list[Answer]) -> None:
    for answer in answers:
        if answer.error is not None and case.action == "error" and case.victim == "self":
            assert type(answer.error) is Internal, answer
            assert f"failpoint {case.point}" in str(answer.error)
            continue
        if answer.error is not None and case.point in SECOND_DEATHS and case.action != "error":
            # Its router was killed before: what two deaths took is told as gone.
            assert type(answer.error) is Stale, answer
            continue
        assert answer.error is None, answer
        assert answer.tokens == system.expected[answer.temperature][: answer.num_tokens], answer


def once(act: Callable[[], None]) -> Callable[[], None]:
    """Whoever calls first does it."""
    first = threading.Lock()
    return lambda: act() if first.acquire(blocking=False) else None
