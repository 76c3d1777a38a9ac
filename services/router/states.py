"""A request's life at the router, as a table.

    QUEUED ──PLACE──▶ PLACED ──FINISH──▶ ENDED
      ▲                │  │
      └── WORKER_LOST ─┘  └──CANCEL──▶ CANCELLING ──FINISH, WORKER_LOST or FAIL──▶ ENDED

A queued request ends at once with CANCEL or FAIL: no worker knows of it. A placed one that is cancelled stays
until its worker has confirmed, because until then it still takes room there.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from diptych.domain.errors import Internal


class State(Enum):
    """Where a request is."""

    QUEUED = "queued"
    PLACED = "placed"
    CANCELLING = "cancelling"
    ENDED = "ended"


class Event(Enum):
    """What happens to it."""

    PLACE = "place"
    WORKER_LOST = "worker_lost"
    CANCEL = "cancel"
    FINISH = "finish"
    FAIL = "fail"


TABLE: Final[dict[State, dict[Event, State]]] = {
    State.QUEUED: {Event.PLACE: State.PLACED, Event.CANCEL: State.ENDED, Event.FAIL: State.ENDED},
    State.PLACED: {
        Event.WORKER_LOST: State.QUEUED,
        Event.CANCEL: State.CANCELLING,
        Event.FINISH: State.ENDED,
        Event.FAIL: State.ENDED,
    },
    State.CANCELLING: {
        Event.CANCEL: State.CANCELLING,
        Event.WORKER_LOST: State.ENDED,
        Event.FINISH: State.ENDED,
        Event.FAIL: State.ENDED,
    },
    State.ENDED: {},
}
TERMINAL: Final = frozenset({State.ENDED})


def advance(state: State, event: Event) -> State:
    """The state after `event`. Raises Internal where the table has no way."""
    try:
        return TABLE[state][event]
    except KeyError:
        raise Internal(f"{event.value} is not possible in {state.value}") from None
