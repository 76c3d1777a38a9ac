"""An engine's check of itself, while it is idle: does anything belong to nobody?

busy ─▶ idle ─ QUIET_S ─▶ checked, then every EVERY_S while nothing happens ─▶ busy

With no request live, free and cached blocks must add up to the whole pool, and no slot may be taken. What
is found is logged once and counted, and the worker goes on: a few lost blocks are no reason to lose its
requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from diptych.domain.engine_report import EngineLoad

log = logging.getLogger(__name__)

QUIET_S = 0.5
"""Idle for so long: what the last request left behind has had its time to end."""
EVERY_S = 5.0


class IdleCheck:
    """`check` raises when something is wrong; `num_owned` tells how many blocks and slots have an owner."""

    def __init__(self, check: Callable[[], None], num_owned: Callable[[], int]) -> None:
        self._check = check
        self._num_owned = num_owned
        self._idle_since: float | None = None
        self._next_at = 0.0
        self.num_checks = 0
        self.num_leaked = 0
        """As the last check found. At least 1 when it found anything."""
        self.finding = ""

    def turn(self, is_idle: bool, now: float) -> None:
        """Called with every turn of the loop; `now` is the loop's clock."""
        if not is_idle:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
            self._next_at = now + QUIET_S
        if now >= self._next_at:
            self._next_at = now + EVERY_S
            self._look()

    def told(self, load: EngineLoad) -> EngineLoad:
        """`load` with what the last check found."""
        if not self.finding:
            return load
        return replace(load, counters={**load.counters, "leaked_blocks": self.num_leaked}, leak=self.finding)

    def _look(self) -> None:
        self.num_checks += 1
        finding = ""
        try:
            self._check()
        except Exception as error:  # noqa: BLE001  # a check must never end what it checks
            finding = str(error) or type(error).__name__
        self.num_leaked = max(1, self._num_owned()) if finding else 0
        if finding and finding != self.finding:
            log.error("idle, yet %d blocks or slots belong to nobody: %s", self.num_leaked, finding)
        self.finding = finding
