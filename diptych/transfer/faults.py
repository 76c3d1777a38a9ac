"""Failures on demand, around any channel: reads that are held, dropped, late, failed or corrupted.

Reads are counted from 1 in the order in which they were started; `EACH` stands for every one. What is not
named goes straight through to the inner channel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from diptych.domain.errors import Draining, TransferFailed
from diptych.domain.ports import KvChannel, MemorySpan, Read, Region, RemotePiece
from diptych.transfer.reads import PendingRead, Reads

EACH = 0


class FaultKind(Enum):
    """What goes wrong; see the methods of `Faults`."""

    HOLD = auto()
    DROP = auto()
    DELAY = auto()
    FAIL = auto()
    CORRUPT = auto()


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one read."""

    kind: FaultKind
    delay_s: float = 0.0


class Faults:
    """Which reads fail, and how. May be changed at any time, for reads that start later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[int, Fault] = {}
        self._held: dict[int, Callable[[], None]] = {}
        self._num_reads = 0

    @property
    def num_reads(self) -> int:
        """Reads that were started so far: to wait until one is under way."""
        return self._num_reads

    def hold(self, number: int) -> None:
        """Read `number` waits for `release` (or its deadline, a cancel, the close)."""
        self._set(number, Fault(FaultKind.HOLD))

    def drop(self, number: int) -> None:
        """Read `number` never arrives: it ends at its deadline."""
        self._set(number, Fault(FaultKind.DROP))

    def delay(self, number: int, delay_s: float) -> None:
        """Read `number` starts `delay_s` seconds late."""
        self._set(number, Fault(FaultKind.DELAY, delay_s))

    def fail(self, number: int) -> None:
        """Read `number` ends with TransferFailed at once, and no byte arrives."""
        self._set(number, Fault(FaultKind.FAIL))

    def corrupt(self, number: int) -> None:
        """Read `number` ends well, with one bit in its middle byte flipped."""
        self._set(number, Fault(FaultKind.CORRUPT))

    def clear(self) -> None:
        """No more faults; held reads stay held until `release`."""
        with self._lock:
            self._faults.clear()

    def release(self, number: int = EACH) -> None:
        """Lets a held read go on its way; by default, all that are held."""
        with self._lock:
            numbers = list(self._held) if number == EACH else [number]
            starts = [self._held.pop(n) for n in numbers if n in self._held]
        for start in starts:
            start()

    def count(self) -> tuple[int, Fault | None]:
        """One more read: its number and its fault. For the channel."""
        with self._lock:
            self._num_reads += 1
            return self._num_reads, self._faults.get(self._num_reads, self._faults.get(EACH))

    def park(self, number: int, start: Callable[[], None]) -> None:
        """Keeps a held read until `release`. For the channel."""
        with self._lock:
            self._held[number] = start

    def forget(self, number: int) -> None:
        """A held read has ended otherwise. For the channel."""
        with self._lock:
            self._held.pop(number, None)

    def _set(self, number: int, fault: Fault) -> None:
        with self._lock:
            self._faults[number] = fault


class FaultyChannel:
    """A `KvChannel` that reads through another, except as `faults` say. Closing it closes the inner one."""

    def __init__(self, inner: KvChannel, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._reads = Reads(inner.kind)

    @property
    def kind(self) -> str:
        return self._inner.kind

    def register(self, memory: MemorySpan) -> Region:
        """Registers with the inner channel."""
        return self._inner.register(memory)

    def prepare(self, memory: MemorySpan) -> None:
        """Prepares it for the inner channel."""
        self._inner.prepare(memory)

    def read(
        self, remote: RemotePiece, local: MemorySpan, deadline_s: float, on_done: Callable[[], None]
    ) -> Read:
        """Starts a read; raises as `Reads.open`."""
        number, fault = self._faults.count()
        if fault is None:
            return self._inner.read(remote, local, deadline_s, on_done)
        alarm = self._reads.alarm

        def ended() -> None:
            self._faults.forget(number)
            on_done()

        read = self._reads.open(remote, local, deadline_s, ended)
        match fault.kind:
            case FaultKind.HOLD:
                self._faults.park(number, lambda: alarm.soon(lambda: self._forward(read)))
            case FaultKind.DROP:
                pass  # its deadline ends it
            case FaultKind.DELAY:
                alarm.at(time.monotonic() + fault.delay_s, lambda: self._forward(read))
            case FaultKind.FAIL:
                read.stop(TransferFailed(f"read {number} failed on demand"))
            case FaultKind.CORRUPT:
                alarm.soon(lambda: self._forward(read, corrupt=True))
        return read

    def close(self) -> None:
        """Ends all reads, refuses new ones, and closes the inner channel."""
        self._reads.stop()
        self._inner.close()
        self._reads.close()

    def _forward(self, read: PendingRead, corrupt: bool = False) -> None:
        """On the alarm's thread: sends the read through the inner channel."""
        if not read.begin():
            return
        alarm = self._reads.alarm

        def arrived() -> None:
            if corrupt and inner.error is None:
                read.local.view()[read.local.num_bytes // 2] ^= 1
            read.finish(inner.error)

        # On the alarm's one thread, which is here now, `arrived` can't run before `inner` is assigned.
        try:
            inner = self._inner.read(read.remote, read.local, read.remaining_s, lambda: alarm.soon(arrived))
        except (Draining, ValueError) as refusal:
            read.finish(TransferFailed(str(refusal)))
        else:
            read.interrupt_with(inner.cancel)
