"""When a child is started, and started again: pure, with time as an argument.

             started            ready
    DOWN ──────────────▶ STARTING ──────▶ READY
      ▲                     │               │
      └───────exited────────┴────exited─────┘        DOWN until `restart_at`, then the hands start it again

The wait before a restart doubles with every death, 0.2 s to 5 s, and is 0.2 s again after a child that was
ready for 10 s: a bad start never spins, and a good worker that is killed once is back at once.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from diptych.domain.errors import Internal

FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 5.0
HEALTHY_S: Final = 10.0


class State(Enum):
    """Where a child is in its life."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"


class Event(Enum):
    """What can happen to a child."""

    STARTED = "started"
    READY = "ready"
    EXITED = "exited"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.DOWN: {Event.STARTED: State.STARTING},
    State.STARTING: {Event.READY: State.READY, Event.EXITED: State.DOWN},
    State.READY: {Event.EXITED: State.DOWN},
}


class Supervision:
    """The life of one child over its restarts. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.state = State.DOWN
        self.num_restarts = 0
        """Starts after the first."""
        self.restart_at = 0.0
        """When DOWN: the moment from which on it is to be started."""
        self._num_starts = 0
        self._wait_s = FIRST_WAIT_S
        self._ready_since = 0.0

    def is_due(self, now: float) -> bool:
        """Whether the child is to be started now."""
        return self.state is State.DOWN and now >= self.restart_at

    def started(self) -> None:
        """A process was started."""
        self._advance(Event.STARTED)
        self.num_restarts = self._num_starts
        self._num_starts += 1

    def ready(self, now: float) -> None:
        """It says that it serves."""
        self._advance(Event.READY)
        self._ready_since = now

    def exited(self, now: float) -> float:
        """It ended by itself, or was killed. Returns the seconds until it is due again."""
        if self.state is State.READY and now - self._ready_since >= HEALTHY_S:
            self._wait_s = FIRST_WAIT_S
        self._advance(Event.EXITED)
        wait_s = self._wait_s
        self.restart_at = now + wait_s
        self._wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return wait_s

    def _advance(self, event: Event) -> None:
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise Internal(f"a child that is {self.state.value} can't have {event.value}")
        self.state = following
