"""One thread that calls back at given times: deadlines, and ends that must not run on the caller's thread."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(order=True, slots=True)
class Call:
    """A call at a time of `time.monotonic`. `cancelled` ones are skipped."""

    when: float
    number: int
    run: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Never runs it, unless it is running now. Drops what it refers to at once."""
        self.run = None


class Alarm:
    """Runs calls in order of their time on one thread of its own, which starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._calls: list[Call] = []
        self._num_calls = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def at(self, when: float, run: Callable[[], None]) -> Call:
        """Calls `run` at `when`, or as soon as possible if that is over. Ignored after `close`."""
        with self._changed:
            self._num_calls += 1
            call = Call(when, self._num_calls, run)
            if self._closed:
                return call
            heapq.heappush(self._calls, call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            if self._calls[0] is call:
                self._changed.notify()
            return call

    def soon(self, run: Callable[[], None]) -> None:
        """Calls `run` as soon as possible, in order."""
        self.at(0.0, run)

    def close(self) -> None:
        """Runs what is due, forgets the rest and ends the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _loop(self) -> None:
        while (call := self._next()) is not None:
            if (run := call.run) is not None:
                try:
                    run()
                except Exception:  # the thread's boundary: one bad call must not stop every deadline
                    logger.exception("a call of %s failed", self._name)
            del call, run  # what they refer to must not live until the next call

    def _next(self) -> Call | None:
        """Waits for the next call's time. None: closed, and nothing is due any more."""
        with self._changed:
            while True:
                now = time.monotonic()
                while self._calls and self._calls[0].run is None:
                    heapq.heappop(self._calls)
                if self._calls and self._calls[0].when <= now:
                    return heapq.heappop(self._calls)
                if self._closed:
                    self._calls.clear()
                    return None
                self._changed.wait(self._calls[0].when - now if self._calls else None)
