"""Measures the links to the cell's prefill workers, at a low rate, while both ends are idle (I/O process).

One round is with the engine at a time; between two rounds of one peer lie `INTERVAL_S`, with jitter, so that
decode workers do not all measure a new peer at once.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from diptych.domain.ports import Region
from diptych.domain.records import ChannelEndpoint, Link, WorkerRecord
from services.decode.links import MAX_TOLD, LinkBook, LinkBound, Peer, Way
from services.decode.messages import ProbeAsked, ProbeDone

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
RETRY_S = 0.5
"""After a round for which the engine had no time."""
FAILED_S = 30.0
"""After a round that failed: a channel that does not lead to a peer seldom does soon."""
LOST_S = 30.0
"""A round of which nothing was heard for so long is given up."""


class LinkWatch:
    """Belongs to one event loop. `peers` tells the prefill workers that could be handed a prompt, slow or
    not; `kinds` the KV channels that we read over."""

    def __init__(
        self,
        bound: LinkBound,
        peers: Callable[[], Sequence[WorkerRecord]],
        kinds: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = LinkBook(bound)
        self._peers = peers
        self._kinds = kinds
        self._clock = clock
        self._asked: tuple[Way, float] | None = None
        self.counters: Counter[str] = Counter()

    @property
    def bound(self) -> LinkBound:
        return self._book.bound

    def ask(self) -> ProbeAsked | None:
        """What the engine should measure now."""
        now, peers = self._clock(), self._peers()
        ways = {way: (peer, region) for peer in peers for way, region in self._ways_to(peer)}
        self._book.keep(ways, now)
        if self._asked is not None and now - self._asked[1] < LOST_S:
            return None
        idle = {way: region for way, (peer, region) in ways.items() if region and _is_idle(peer)}
        due = self._book.due(idle, now)
        if due is None:
            return None
        self._asked = due, now
        large = self._book.asked(due, now + INTERVAL_S * random.uniform(0.7, 1.3))
        return ProbeAsked(*due[:2], idle[due], large)

    def measured(self, done: ProbeDone) -> None:
        """A round is over."""
        now, way = self._clock(), (done.worker_id, done.epoch, done.channel)
        self._asked = None
        if done.error:
            self.counters["probe_failed"] += 1
            log.info("%s was not measured over %s: %s", done.worker_id, done.channel, done.error)
            self._book.put_off(way, now + FAILED_S)
        elif not done.rtts:
            self._book.put_off(way, now + RETRY_S)
            return
        was_slow = self._book.is_too_slow(way)
        self._book.measured(way, done.rtts, done.bytes_per_s, now)
        if self._book.is_too_slow(way) and not was_slow:
            log.warning("the link to %s over %s is past its bound of %g µs", done.worker_id, done.channel,
                        self.bound.max_rtt_s * 1e6)  # fmt: skip

    def refuses(self, peer: Peer) -> bool:
        """Whether we were told not to use links so slow, and it has no others."""
        ways = self._book.ways_to(peer)
        return bool(ways) and all(map(self._book.refuses, ways))

    def refused_kinds(self, peer: Peer) -> list[str]:
        """The channels over which its link is not to be used."""
        return [way[2] for way in self._book.ways_to(peer) if self._book.refuses(way)]

    def links(self) -> tuple[Link, ...]:
        """All links, the slowest first."""
        return self._book.links(self._clock())

    def told(self) -> tuple[Link, ...]:
        """Those that our registration tells: the slowest, and the fastest, which is what routers go by."""
        links = self.links()
        return links if len(links) <= MAX_TOLD else (*links[: MAX_TOLD - 1], links[-1])

    def _ways_to(self, peer: WorkerRecord) -> Iterator[tuple[Way, Region | None]]:
        kinds = self._kinds()
        for endpoint in peer.channels:
            if endpoint.kind in kinds:
                yield (peer.worker_id, peer.epoch, endpoint.kind), _region(endpoint)


def _region(endpoint: ChannelEndpoint) -> Region | None:
    """What may be read there to measure the way; None where nothing may."""
    try:
        key = bytes.fromhex(endpoint.probe_key)
    except ValueError:
        return None
    if not key or endpoint.probe_bytes < 1:
        return None
    return Region(endpoint.kind, endpoint.address, key, endpoint.probe_bytes)


def _is_idle(peer: WorkerRecord) -> bool:
    return not (peer.load.num_running or peer.load.num_waiting)
