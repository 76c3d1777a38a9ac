"""Does something to one process of a running system when another passes a point of the protocol."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Self

from tests.support.matrix import System, children_of, send_signal

MAX_MEMORY = 256 << 20
"""Of the store that `up` starts, in bytes."""


class Disturbance:
    """Armed when entered; what was stopped goes on, and what was taken is given back, when left.

    `victim` is "self" (whoever passes the point), "engine" (its engine process) or "store". `action` is
    "kill", "stop" or "error", and for the store "flush". To an error of the store belongs that it has no
    memory left.
    """

    def __init__(self, system: System, point: str, victim: str, action: str) -> None:
        self._system = system
        self._point = point
        self._victim = victim
        self._action = action
        self._happened = threading.Event()
        self._over = threading.Event()
        self._stopped: list[int] = []
        self._watch = threading.Thread(target=self._await_point)

    def has_happened(self, within_s: float) -> bool:
        """Waits for it."""
        return self._happened.wait(within_s)

    def __enter__(self) -> Self:
        self._system.arm(self._point, self._action if self._victim == "self" else "hold")
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._system.withdraw()
        self._over.set()
        self._watch.join()
        for pid in self._stopped:
            send_signal(pid, signal.SIGCONT)
        if self._victim == "store" and self._action == "error" and self._happened.is_set():
            with self._system.store() as store:
                store.config_set("maxmemory", MAX_MEMORY)
        self._system.disarm()

    def _await_point(self) -> None:
        while (pid := self._system.taken_by()) is None:
            if self._over.is_set():
                return
            self._over.wait(0.002)
        try:
            self._act(pid)
        finally:
            if self._victim != "self":
                self._system.disarm()
            self._happened.set()

    def _act(self, pid: int) -> None:
        match self._victim, self._action:
            case "self", "stop":
                self._stopped.append(pid)
            case "self", _:
                pass  # it has acted
            case "engine", _:
                self._signal(children_of(pid)[0])
            case "store", "error":
                with self._system.store() as store:
                    store.config_set("maxmemory", 1)
            case "store", "flush":
                with self._system.store() as store:
                    store.flushall()
                    store.function_flush()
            case "store", _:
                self._signal(self._system.up.pid_of("store"))

    def _signal(self, pid: int) -> None:
        if self._action == "kill":
            send_signal(pid, signal.SIGKILL)
        else:
            send_signal(pid, signal.SIGSTOP)
            self._stopped.append(pid)
