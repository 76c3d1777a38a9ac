"""How far each prefill worker is over each KV channel, and which links may be used (pure; times are
arguments).

    peer known ─▶ due at once ─▶ asked ─▶ measured ─▶ due again after a while ─▶ … ─▶ peer gone: forgotten
                                   └── not now, or failed: what was known stays ─▶ due again

A round trip is that of the smallest of a few small reads over the KV channel, threads and copies included:
what a chunk's read really waits for. Of the last three rounds the middle one counts, so that one bad moment
condemns no link. A link that was never measured is not too slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import Link

Peer = tuple[WorkerId, Epoch]
Way = tuple[WorkerId, Epoch, str]
"""A peer over one KV channel."""

ROUNDS = 3
LARGE_EVERY = 12
"""One round in so many also reads a large piece, for the bandwidth."""
MAX_TOLD = 16
"""Links that go into our registration, which should stay small."""


@dataclass(frozen=True, slots=True)
class LinkBound:
    """`max_rtt_s` 0: none. `enforced`: a link past it is not used; else it is only shown."""

    max_rtt_s: float = 0.0
    enforced: bool = False


@dataclass(slots=True)
class _Measurements:
    due_at: float
    num_asked: int = 0
    rtts: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    bytes_per_s: float = 0.0
    measured_at: float = 0.0

    @property
    def rtt_s(self) -> float:
        return median(self.rtts) if self.rtts else 0.0


class LinkBook:
    """The links of one decode worker."""

    def __init__(self, bound: LinkBound) -> None:
        self.bound = bound
        self._ways: dict[Way, _Measurements] = {}

    def keep(self, ways: Collection[Way], now: float) -> None:
        """These are the ways: new ones are due at once, what was known of others is forgotten."""
        for gone in self._ways.keys() - set(ways):
            del self._ways[gone]
        for way in ways:
            self._ways.setdefault(way, _Measurements(now))

    def due(self, idle: Iterable[Way], now: float) -> Way | None:
        """Which of the idle ways to measure now: the one that has waited longest."""
        waiting = [way for way in idle if way in self._ways and self._ways[way].due_at <= now]
        return min(waiting, key=lambda way: self._ways[way].due_at, default=None)

    def asked(self, way: Way, due_at: float) -> bool:
        """A round has begun, the next is due at `due_at`. Whether it is one with a large read."""
        known = self._ways[way]
        known.due_at = due_at
        known.num_asked += 1
        return known.num_asked % LARGE_EVERY == 1

    def put_off(self, way: Way, due_at: float) -> None:
        """There was no time for the round, or it failed: it is as if nobody had asked."""
        if way in self._ways:
            self._ways[way].due_at = due_at
            self._ways[way].num_asked -= 1

    def measured(self, way: Way, rtts: Sequence[float], bytes_per_s: float, now: float) -> None:
        """What a round gave: seconds of its small reads, bytes a second of its large one (0: none)."""
        known = self._ways.get(way)
        if known is None or not rtts:
            return
        known.rtts.append(min(rtts))
        known.bytes_per_s = bytes_per_s or known.bytes_per_s
        known.measured_at = now

    def is_too_slow(self, way: Way) -> bool:
        """Whether the way is past the bound."""
        known = self._ways.get(way)
        return known is not None and 0 < self.bound.max_rtt_s < known.rtt_s

    def refuses(self, way: Way) -> bool:
        """Whether nothing may be read that way."""
        return self.bound.enforced and self.is_too_slow(way)

    def ways_to(self, peer: Peer) -> list[Way]:
        """All that are known."""
        return [way for way in self._ways if way[:2] == peer]

    def links(self, now: float) -> tuple[Link, ...]:
        """All of them, the slowest first."""
        told = [self._link(way, known, now) for way, known in self._ways.items()]
        return tuple(sorted(told, key=lambda link: -link.rtt_s))

    def _link(self, way: Way, known: _Measurements, now: float) -> Link:
        age_s = now - known.measured_at if known.rtts else 0.0
        worker_id, epoch, channel = way
        return Link(
            worker_id, epoch, known.rtt_s, known.bytes_per_s, age_s, self.is_too_slow(way),
            not self.refuses(way), channel,
        )  # fmt: skip
