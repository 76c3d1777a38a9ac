"""One child over its restarts: the hands to `supervision.py`'s brain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diptych.cli.process import Running, describe_exit
from diptych.cli.supervision import State, Supervision
from diptych.domain.errors import DiptychError


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to a child, in words."""

    name: str
    what: str


class Member:
    """A child by its stable name. `launch` starts a process, each time anew."""

    def __init__(self, name: str, role: str, launch: Callable[[], Running]) -> None:
        self.name = name
        self.role = role
        self.supervision = Supervision()
        self.address = ""
        """Where it listens, or listened last; empty before it has said so."""
        self.last_words: list[str] = []
        """The end of what its last process wrote, once that has ended."""
        self._launch = launch
        self._process: Running | None = None

    @property
    def state(self) -> State:
        return self.supervision.state

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_status() is None

    @property
    def pid(self) -> int:
        """0 while it is down. May be read by another thread."""
        process = self._process
        return process.pid if process else 0

    def tick(self, now: float) -> Iterator[Change]:
        """Reaps the process if it has ended, starts one if that is due, notices when it is ready."""
        if self._process and (status := self._process.exit_status()) is not None:
            yield self._exited(describe_exit(status), self._process.last_lines(), now)
        if self.supervision.is_due(now):
            self.supervision.started()
            try:
                self._process = self._launch()
            except (DiptychError, OSError) as error:
                yield self._exited("could not be started", [str(error)], now)
        if self.state is State.STARTING and self._process and (address := self._process.address()):
            self.address = address
            self.supervision.ready(now)
            yield Change(self.name, f"ready on {address} (pid {self.pid})")

    def terminate(self) -> None:
        """Asks the process to leave."""
        if self._process:
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process, and waits for that. Idempotent."""
        if self._process:
            self._process.kill()

    def _exited(self, how: str, last_words: list[str], now: float) -> Change:
        self._process = None
        self.last_words = last_words
        wait_s = self.supervision.exited(now)
        return Change(self.name, f"{how}; starting it again in {wait_s:.1f} s")
