"""The KV channels of one process, the best first, as one.

Memory is registered with each, and a region says which of them reads it. Which one a pair uses is its
reader's choice: whoever announces memory tells all its regions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from diptych.domain.ports import KvChannel, MemorySpan, Read, Region, RemotePiece


class ChannelSet:
    """Owns its channels."""

    def __init__(self, channels: Sequence[KvChannel]) -> None:
        """At least one, no two of a kind."""
        self._channels = {channel.kind: channel for channel in channels}

    @classmethod
    def of(cls, channel: KvChannel | ChannelSet) -> ChannelSet:
        """A single channel as a set."""
        return channel if isinstance(channel, ChannelSet) else cls([channel])

    @property
    def kinds(self) -> tuple[str, ...]:
        """The best first."""
        return tuple(self._channels)

    def register(self, memory: MemorySpan) -> list[Region]:
        """Lets peers read `memory` over each channel that can; raises the last ValueError when none can."""
        regions: list[Region] = []
        problem: ValueError | None = None
        for channel in self._channels.values():
            try:
                regions.append(channel.register(memory))
            except ValueError as refusal:
                problem = refusal
        if problem is not None and not regions:
            raise problem
        return regions

    def prepare(self, memory: MemorySpan) -> None:
        """Tells each channel that reads will land in parts of `memory`."""
        for channel in self._channels.values():
            channel.prepare(memory)

    def read(
        self, remote: RemotePiece, local: MemorySpan, deadline_s: float, on_done: Callable[[], None]
    ) -> Read:
        """Starts a read over the channel of the region's kind. Raises ValueError for a kind that is not
        here, else as that channel does."""
        channel = self._channels.get(remote.region.kind)
        if channel is None:
            known = ", ".join(self._channels)
            raise ValueError(f"no channel of kind {remote.region.kind!r} is open here, only {known}")
        return channel.read(remote, local, deadline_s, on_done)

    def close(self) -> None:
        """Closes them all, whatever one of them says."""
        with contextlib.ExitStack() as closing:
            for channel in self._channels.values():
                closing.callback(channel.close)
