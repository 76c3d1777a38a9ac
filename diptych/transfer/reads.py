"""What every channel's reads share: their states, their end, and the checks before they start.

    QUEUED ──begin()──▶ RUNNING ──finish()──▶ DONE
       └────── stop() ──────────────────────────▲

A worker of the channel takes a read from QUEUED to RUNNING and is then the only one who writes to the local
span and who may finish it: that is why no byte changes after DONE. `stop` (cancel, deadline, close) ends a
QUEUED read on the alarm's thread; a RUNNING one it only interrupts. `on_done` never runs on the thread that
called `read` or `cancel`, so a caller may hold a lock that its `on_done` takes as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from diptych.domain.errors import Draining, PeerError, TransferFailed
from diptych.domain.ports import MemorySpan, RemotePiece
from diptych.transfer.alarm import Alarm

MAX_DEADLINE_S = 600.0
"""A source gives up on a reader after this long, so nobody may ask for more."""

logger = logging.getLogger(__name__)

Devices = Callable[[str], bool]
"""Whether a channel can read from and into memory on a device."""


def is_host(device: str) -> bool:
    """For channels that know host memory only."""
    return device == "cpu"


class State(Enum):
    """Of one read."""

    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()


class PendingRead:
    """A `diptych.domain.ports.Read`, seen from the side of the channel that serves it."""

    def __init__(
        self,
        remote: RemotePiece,
        local: MemorySpan,
        deadline_s: float,
        alarm: Alarm,
        on_end: Callable[[PendingRead], None],
    ) -> None:
        self.remote = remote
        self.local = local
        self.deadline = time.monotonic() + deadline_s
        self._alarm = alarm
        self._on_end = on_end
        self._lock = threading.Lock()
        self._state = State.QUEUED
        self._error: PeerError | None = None
        self._stopped: PeerError | None = None
        self._interrupt: Callable[[], object] | None = None
        late = TransferFailed(f"{remote.region.address}: not complete after {deadline_s:g} s")
        self._timer = alarm.at(self.deadline, lambda: self.stop(late))

    @property
    def done(self) -> bool:
        """True once no byte of the local span will change any more."""
        return self._state is State.DONE

    @property
    def error(self) -> PeerError | None:
        """After `done`: None when every byte arrived, else why not."""
        return self._error

    @property
    def stopped(self) -> bool:
        """Whether somebody asked for its end: its worker should bring it about."""
        return self._stopped is not None

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, 0 when it is over."""
        return max(0.0, self.deadline - time.monotonic())

    def cancel(self) -> None:
        """Asks for an early end."""
        self.stop(TransferFailed("the read was cancelled"))

    def stop(self, reason: PeerError) -> None:
        """Ends the read for `reason`: at once while QUEUED, else when its worker hears the interrupt.

        The first reason counts. A read whose last byte has arrived by then still succeeds.
        """
        with self._lock:
            if self._stopped is not None or self._state is State.DONE:
                return
            self._stopped = reason
            queued, interrupt = self._state is State.QUEUED, self._interrupt
        if queued:
            self._alarm.soon(lambda: self.finish(reason))
        elif interrupt is not None:
            interrupt()

    def begin(self) -> bool:
        """QUEUED to RUNNING, by a worker. False when the read was stopped: then leave it alone."""
        with self._lock:
            if self._stopped is not None:
                return False
            self._state = State.RUNNING
            return True

    def interrupt_with(self, interrupt: Callable[[], object]) -> None:
        """How `stop` reaches the worker from now on; called at once if `stop` came first."""
        with self._lock:
            self._interrupt = interrupt
            stopped = self._stopped is not None
        if stopped:
            interrupt()

    def finish(self, error: PeerError | None) -> None:
        """To DONE, by the worker. Where `stop` caused `error`, the caller sees the reason of `stop`."""
        with self._lock:
            self._error = error if error is None or self._stopped is None else self._stopped
            self._state = State.DONE
            self._interrupt = None
        self._timer.cancel()
        self._on_end(self)


class Reads:
    """The live reads of one channel, and the clock that ends them."""

    def __init__(self, kind: str, devices: Devices = is_host) -> None:
        self._kind = kind
        self._devices = devices
        self.alarm = Alarm(f"kv-{kind}-alarm")
        self._lock = threading.Lock()
        self._live: dict[PendingRead, Callable[[], None]] = {}
        self._closed = False

    def open(
        self, remote: RemotePiece, local: MemorySpan, deadline_s: float, on_done: Callable[[], None]
    ) -> PendingRead:
        """A new read in state QUEUED, with its deadline running.

        Raises ValueError for lengths that differ or are 0, memory that is not the host's, a region of
        another kind of channel, and a deadline out of bounds; Draining after `stop`.
        """
        self._check(remote, local, deadline_s)
        with self._lock:
            self.check_open()
            read = PendingRead(remote, local, deadline_s, self.alarm, self._ended)
            self._live[read] = on_done
        return read

    def check_open(self) -> None:
        """Raises Draining after `stop`."""
        if self._closed:
            raise Draining(f"the {self._kind} channel is closed")

    def stop(self) -> None:
        """Refuses new reads and stops the live ones, which end on their workers or on the alarm's thread."""
        with self._lock:
            self._closed = True
            live = list(self._live)
        for read in live:
            read.stop(TransferFailed(f"the {self._kind} channel was closed"))

    def close(self) -> None:
        """Waits for the ends that `stop` asked of the alarm's thread. Comes after the workers have ended."""
        self.alarm.close()

    def _check(self, remote: RemotePiece, local: MemorySpan, deadline_s: float) -> None:
        if remote.region.kind != self._kind:
            raise ValueError(f"a {self._kind} channel can't read a region of kind {remote.region.kind!r}")
        if not self._devices(local.device):
            raise ValueError(f"{self._kind} reads into host memory, not into memory on {local.device}")
        if remote.num_bytes != local.num_bytes or local.num_bytes < 1:
            raise ValueError(f"can't read {remote.num_bytes} bytes into {local.num_bytes}")
        if remote.offset < 0:
            raise ValueError(f"offset {remote.offset} is before the region")
        if not deadline_s <= MAX_DEADLINE_S:
            raise ValueError(f"a read's deadline is at most {MAX_DEADLINE_S:g} s, not {deadline_s:g}")

    def _ended(self, read: PendingRead) -> None:
        with self._lock:
            on_done = self._live.pop(read)
        try:
            on_done()
        except Exception:  # the callback's fault must not end a worker that serves other reads
            logger.exception("on_done of a %s read failed", self._kind)
