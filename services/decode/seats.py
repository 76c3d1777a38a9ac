"""Where each live request of a decode worker is, which blocks it has, and who gives them up for whom (pure).

    waiting   no blocks
    awaiting  blocks for all of its tokens and one more, whose KV comes from elsewhere
    active    the same, runs or is prefilled here

A request that needs one block more takes those of the last in rank; the last one itself waits, or starts over
from its tokens:

    first  ◀── keeps its blocks ───────────── gives them up ──▶  last
    came first of the active │ then by place, active and awaiting

The one that came first of the active is never preempted, whatever its priority: so there is always one that
ends.
"""

from __future__ import annotations

import bisect
from operator import attrgetter

from diptych.domain.errors import Internal
from diptych.domain.holding import KvPools
from services.decode.request import DecodeRequest

_place = attrgetter("place")


class Seats:
    """All three lists are sorted by place. Only this takes and releases blocks."""

    def __init__(self, pools: KvPools) -> None:
        self.pools = pools
        self.waiting: list[DecodeRequest] = []
        self.awaiting: list[DecodeRequest] = []
        self.active: list[DecodeRequest] = []

    @property
    def num_taken(self) -> int:
        """Requests with blocks."""
        return len(self.awaiting) + len(self.active)

    @property
    def reserved_tokens(self) -> int:
        """Positions in the blocks of those that await their KV."""
        return sum(request.holding.num_tokens for request in self.awaiting if request.holding is not None)

    def wait(self, request: DecodeRequest) -> None:
        """It has no blocks, or gives them back, and waits."""
        self.leave(request)
        request.num_computed = 0
        request.extend_hashes(self.pools.block_tokens)
        bisect.insort(self.waiting, request, key=_place)

    def can_take(self, request: DecodeRequest) -> bool:
        """Whether there are blocks for all of its tokens and one more."""
        limit, need = _limits(request)
        return self.pools.can_open(request.hashes, limit, need)

    def take(self, request: DecodeRequest) -> None:
        """Gives it these blocks, those of its cached prefix among them."""
        limit, need = _limits(request)
        self.waiting.remove(request)
        request.holding = self.pools.open(request.hashes, limit)
        request.holding.grow(need)
        request.num_computed = request.holding.num_cached_tokens

    def await_kv(self, request: DecodeRequest) -> None:
        """It has blocks, and its KV comes from elsewhere."""
        bisect.insort(self.awaiting, request, key=_place)

    def activate(self, request: DecodeRequest) -> None:
        """It has blocks, and its KV is here or will be computed here."""
        if request in self.awaiting:
            self.awaiting.remove(request)
        bisect.insort(self.active, request, key=_place)

    def publish(self, request: DecodeRequest) -> None:
        """Names the full blocks of what is computed: others may share them."""
        if request.holding is not None:
            request.extend_hashes(self.pools.block_tokens)
            request.holding.publish_upto(request.num_computed, request.hashes)

    def leave(self, request: DecodeRequest) -> None:
        """Takes it out of wherever it is. Its blocks are free when this returns."""
        for group in (self.waiting, self.awaiting, self.active):
            if request in group:
                group.remove(request)
        if request.holding is not None:
            request.holding.release()
            request.holding = None

    def ranked(self) -> list[DecodeRequest]:
        """The active ones, the one that keeps its blocks longest first."""
        came_first = min(self.active, key=attrgetter("arrival"), default=None)
        return sorted(self.active, key=lambda request: (request is not came_first, request.place))

    def victim(self) -> DecodeRequest:
        """Who gives up its blocks next; something must be active."""
        came_first, *others = self.ranked()
        return max((*others, *self.awaiting), key=_place, default=came_first)

    def assert_empty(self) -> None:
        """Raises Internal unless nobody is anywhere, and no block is owned."""
        self.pools.check_integrity([])
        left = [*self.waiting, *self.awaiting, *self.active]
        if left:
            raise Internal(f"left: {[request.request_id for request in left]}")


def _limits(request: DecodeRequest) -> tuple[int, int]:
    """Most tokens of its cached prefix: somebody must compute one to have logits. Positions that it needs."""
    return len(request.tokens) - 1, len(request.tokens) + 1
