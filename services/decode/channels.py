"""Over which channel a chunk is read (pure; times are arguments).

    kinds of ours, best first ─▶ offered? ─▶ not too slow? ─▶ not failed lately? ─▶ this one
                                   └ no        └ no             └ no ─▶ the next kind; why is told

A chunk is announced with a region for each channel of its owner. When nothing is left after all, the last
that both speak is used: it may work, and a read that fails is tried once more, over the next kind if there
is one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diptych.domain.fallbacks import Fallback
from diptych.domain.ports import Region, RemotePiece

SHUN_S = 30.0
"""How long a channel to an owner is left alone after a read over it failed, where there is another one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to read, and why it is not over our best channel."""

    piece: RemotePiece
    fallback: Fallback | None = None


class ChannelChoice:
    """Of one decode worker. `kinds`: those that it speaks, best first; none: whatever is announced first."""

    def __init__(self, kinds: Sequence[str] = ()) -> None:
        self._kinds = tuple(kinds)
        self._shunned: dict[tuple[str, str], float] = {}

    def choose(
        self, piece: RemotePiece, others: Sequence[Region], slow: Collection[str], turn: int, now: float
    ) -> Choice:
        """`slow`: kinds over which the link is past its bound. `turn`: 0, or 1 for the second try."""
        offered = {region.kind: region for region in (*others, piece.region)}
        shared = [offered[kind] for kind in self._kinds if kind in offered]
        if not shared:
            return Choice(piece)
        usable = [
            region for region in shared if region.kind not in slow and not self._is_shunned(region, now)
        ] or shared[-1:]
        region = usable[min(turn, len(usable) - 1)]
        chosen = RemotePiece(region, piece.offset, piece.num_bytes)
        if region.kind == self._kinds[0]:
            return Choice(chosen)
        if self._kinds[0] not in offered:
            return Choice(chosen, Fallback.CHANNEL_NOT_SPOKEN)
        too_slow = self._kinds[0] in slow
        return Choice(chosen, Fallback.CHANNEL_TOO_SLOW if too_slow else Fallback.CHANNEL_FAILED)

    def failed(self, region: Region, now: float) -> None:
        """A read of it did not complete."""
        self._shunned = {name: until for name, until in self._shunned.items() if until > now}
        self._shunned[region.kind, region.address] = now + SHUN_S

    def _is_shunned(self, region: Region, now: float) -> bool:
        return self._shunned.get((region.kind, region.address), 0.0) > now
