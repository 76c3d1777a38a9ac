"""The engine's side of measuring links: a few reads of a peer's probe region over the real KV channel.

asked ─▶ small reads, one after the other ─▶ perhaps a large one ─▶ told
              └── a request comes, or a read fails: what there is by then is told

One round at a time, only while the engine has nothing else to do; each read has its deadline. Read times are
stamped by the thread that ends the read, so that they do not include our own loop's pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.domain.errors import PeerError
from diptych.domain.ports import KvChannel, MemorySpan, Read, RemotePiece
from diptych.engine.memory import allocate
from diptych.transfer.several import ChannelSet
from services.decode.messages import ProbeAsked, ProbeDone

NUM_SMALL = 5
SMALL_BYTES = 64
MAX_LARGE_BYTES = 1 << 20
READ_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Round:
    asked: ProbeAsked
    rtts: list[float] = field(default_factory=list)
    large_s: float = 0.0
    read: Read | None = None
    is_large: bool = False
    started_at: float = 0.0
    ended_at: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def reading(self) -> bool:
        return self.read is not None and not self.ended_at

    @property
    def wants_small(self) -> bool:
        return len(self.rtts) < NUM_SMALL

    @property
    def complete(self) -> bool:
        return not self.wants_small and (self.large_s > 0 or not self.asked.large)


class Probes:
    """Belongs to the engine's loop. `wake` makes that loop turn; it is called from any thread."""

    def __init__(
        self,
        channel: KvChannel | ChannelSet,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._channels = ChannelSet.of(channel)
        self._wake = wake
        self._clock = clock
        self._scratch: MemorySpan | None = None
        self._round: _Round | None = None
        self._refused: list[ProbeAsked] = []

    @property
    def idle(self) -> bool:
        """No round is under way."""
        return self._round is None

    def ask(self, asked: ProbeAsked) -> None:
        """Begins a round; one that is under way goes first, and this one is put off."""
        if self._round is None:
            self._round = _Round(asked)
        else:
            self._refused.append(asked)

    def turn(self, busy: bool) -> list[ProbeDone]:
        """Takes in a read that has ended and starts the next. Returns the rounds that are over."""
        over = [ProbeDone(asked.worker_id, asked.epoch, channel=asked.region.kind) for asked in self._refused]
        self._refused.clear()
        ongoing = self._round
        if ongoing is None or ongoing.reading:
            return over
        self._take(ongoing)
        if ongoing.error or busy or ongoing.complete or not self._read_more(ongoing):
            self._round = None
            over.append(_told(ongoing))
        return over

    def _take(self, ongoing: _Round) -> None:
        read, ongoing.read = ongoing.read, None
        if read is None:
            return
        if read.error is not None:
            ongoing.error = str(read.error)
            return
        elapsed_s = max(ongoing.ended_at.pop() - ongoing.started_at, 1e-9)
        if ongoing.is_large:
            ongoing.large_s = elapsed_s
        else:
            ongoing.rtts.append(elapsed_s)

    def _read_more(self, ongoing: _Round) -> bool:
        """Starts the next read; False when it can't be started."""
        region = ongoing.asked.region
        ongoing.is_large = not ongoing.wants_small
        size = MAX_LARGE_BYTES if ongoing.is_large else SMALL_BYTES
        num_bytes = min(size, region.num_bytes)
        if self._scratch is None:
            self._scratch = allocate(MAX_LARGE_BYTES)
            self._channels.prepare(self._scratch)
        ended_at: list[float] = []
        ongoing.ended_at = ended_at

        def on_done() -> None:
            ended_at.append(self._clock())
            self._wake()

        ongoing.started_at = self._clock()
        try:
            piece = RemotePiece(region, 0, num_bytes)
            ongoing.read = self._channels.read(
                piece, self._scratch.slice(0, num_bytes), READ_TIMEOUT_S, on_done
            )
        except (PeerError, ValueError) as error:
            ongoing.error = str(error)
            return False
        return True


def _told(ongoing: _Round) -> ProbeDone:
    asked = ongoing.asked
    size = min(MAX_LARGE_BYTES, asked.region.num_bytes)
    bytes_per_s = size / ongoing.large_s if ongoing.large_s else 0.0
    return ProbeDone(
        asked.worker_id, asked.epoch, ongoing.rtts, bytes_per_s, ongoing.error, asked.region.kind
    )
