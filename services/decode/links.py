"""How far each prefill worker is, and whether its links may be used (pure; times are arguments).

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
        self._peers: dict[Peer, _Measurements] = {}

    def keep(self, peers: Collection[Peer], now: float) -> None:
        """These are the peers: new ones are due at once, what was known of others is forgotten."""
        for gone in self._peers.keys() - set(peers):
            del self._peers[gone]
        for peer in peers:
            self._peers.setdefault(peer, _Measurements(now))

    def due(self, idle: Iterable[Peer], now: float) -> Peer | None:
        """Whom of the idle peers to measure now: the one that has waited longest."""
        waiting = [peer for peer in idle if peer in self._peers and self._peers[peer].due_at <= now]
        return min(waiting, key=lambda peer: self._peers[peer].due_at, default=None)

    def asked(self, peer: Peer, due_at: float) -> bool:
        """A round has begun, the next is due at `due_at`. Whether it is one with a large read."""
        known = self._peers[peer]
        known.due_at = due_at
        known.num_asked += 1
        return known.num_asked % LARGE_EVERY == 1

    def put_off(self, peer: Peer, due_at: float) -> None:
        """There was no time for the round: it is as if nobody had asked."""
        if peer in self._peers:
            self._peers[peer].due_at = due_at
            self._peers[peer].num_asked -= 1

    def measured(self, peer: Peer, rtts: Sequence[float], bytes_per_s: float, now: float) -> None:
        """What a round gave: seconds of its small reads, bytes a second of its large one (0: none)."""
        known = self._peers.get(peer)
        if known is None or not rtts:
            return
        known.rtts.append(min(rtts))
        known.bytes_per_s = bytes_per_s or known.bytes_per_s
        known.measured_at = now

    def is_too_slow(self, peer: Peer) -> bool:
        """Whether the peer is past the bound."""
        known = self._peers.get(peer)
        return known is not None and 0 < self.bound.max_rtt_s < known.rtt_s

    def refuses(self, peer: Peer) -> bool:
        """Whether nothing may be read from the peer."""
        return self.bound.enforced and self.is_too_slow(peer)

    def links(self, now: float) -> tuple[Link, ...]:
        """All of them, the slowest first."""
        told = [self._link(peer, known, now) for peer, known in self._peers.items()]
        return tuple(sorted(told, key=lambda link: -link.rtt_s))

    def _link(self, peer: Peer, known: _Measurements, now: float) -> Link:
        age_s = now - known.measured_at if known.rtts else 0.0
        return Link(
            *peer, known.rtt_s, known.bytes_per_s, age_s, self.is_too_slow(peer), not self.refuses(peer)
        )
