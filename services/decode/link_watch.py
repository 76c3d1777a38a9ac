"""Measures the links to the cell's prefill workers, at a low rate, while both ends are idle (I/O process).

One round is with the engine at a time; between two rounds of one peer lie `INTERVAL_S`, with jitter, so that
decode workers do not all measure a new peer at once.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from diptych.domain.ports import Region
from diptych.domain.records import ChannelEndpoint, Link, WorkerRecord
from services.decode.links import MAX_TOLD, LinkBook, LinkBound, Peer
from services.decode.messages import ProbeAsked, ProbeDone

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
RETRY_S = 0.5
"""After a round for which the engine had no time."""
LOST_S = 30.0
"""A round of which nothing was heard for so long is given up."""


class LinkWatch:
    """Belongs to one event loop. `peers` tells the prefill workers that could be handed a prompt, slow or
    not; `kind` the KV channel that we read over."""

    def __init__(
        self,
        bound: LinkBound,
        peers: Callable[[], Sequence[WorkerRecord]],
        kind: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = LinkBook(bound)
        self._peers = peers
        self._kind = kind
        self._clock = clock
        self._asked: tuple[Peer, float] | None = None
        self.counters: Counter[str] = Counter()

    @property
    def bound(self) -> LinkBound:
        return self._book.bound

    def ask(self) -> ProbeAsked | None:
        """What the engine should measure now."""
        now, peers = self._clock(), self._peers()
        self._book.keep([_name(peer) for peer in peers], now)
        if self._asked is not None and now - self._asked[1] < LOST_S:
            return None
        idle = {_name(peer): peer for peer in peers if _is_idle(peer) and self._probe(peer)}
        due = self._book.due(idle, now)
        region = self._probe(idle[due]) if due else None
        if due is None or region is None:
            return None
        self._asked = due, now
        large = self._book.asked(due, now + INTERVAL_S * random.uniform(0.7, 1.3))
        return ProbeAsked(*due, region, large)

    def measured(self, done: ProbeDone) -> None:
        """A round is over."""
        now, peer = self._clock(), (done.worker_id, done.epoch)
        self._asked = None
        if done.error:
            self.counters["probe_failed"] += 1
            log.info("%s was not measured: %s", done.worker_id, done.error)
        elif not done.rtts:
            self._book.put_off(peer, now + RETRY_S)
            return
        was_slow = self._book.is_too_slow(peer)
        self._book.measured(peer, done.rtts, done.bytes_per_s, now)
        if self._book.is_too_slow(peer) and not was_slow:
            log.warning("the link to %s is past its bound of %g µs", done.worker_id,
                        self.bound.max_rtt_s * 1e6)  # fmt: skip

    def refuses(self, peer: Peer) -> bool:
        """Whether we were told not to use so slow a link."""
        return self._book.refuses(peer)

    def links(self) -> tuple[Link, ...]:
        """All links, the slowest first."""
        return self._book.links(self._clock())

    def told(self) -> tuple[Link, ...]:
        """Those that our registration tells."""
        return self.links()[:MAX_TOLD]

    def _probe(self, peer: WorkerRecord) -> Region | None:
        kind = self._kind()
        regions = (_region(endpoint) for endpoint in peer.channels if endpoint.kind == kind)
        return next((region for region in regions if region), None)


def _name(peer: WorkerRecord) -> Peer:
    return peer.worker_id, peer.epoch


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
