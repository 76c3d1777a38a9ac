"""The chunks that peers may read from the send ring, and who still does (pure).

pack ─▶ readable by {decode} or {decode, cache} ─▶ each reader releases ─▶ slot free
                │ lease ends                               attempt stopped: decode's part is released
                ▼
              expired: slot free, whoever reads on gets bytes that its digest refuses
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.domain.errors import Internal
from diptych.domain.slots import Slot, SlotRing
from services.prefill.messages import AttemptKey

SourceKey = tuple[AttemptKey, int]

DECODE = "decode"
CACHE = "cache"


@dataclass(slots=True)
class Source:
    """One chunk's slot, and who still reads it."""

    slot: Slot[SourceKey]
    readers: set[str]


class Sources:
    """Keeps a slot as long as somebody reads it, within its lease."""

    def __init__(self, ring: SlotRing[SourceKey], lease_s: float) -> None:
        self._ring = ring
        self._lease_s = lease_s
        self._sources: dict[SourceKey, Source] = {}

    @property
    def ring(self) -> SlotRing[SourceKey]:
        return self._ring

    def open(self, key: AttemptKey, index: int, readers: set[str], now: float) -> Slot[SourceKey] | None:
        """A slot for a chunk, or None when all are taken. Raises Internal for a chunk that has one."""
        if (key, index) in self._sources:
            raise Internal(f"chunk {index} of {key} is open already")
        slot = self._ring.take((key, index), now, self._lease_s)
        if slot is not None:
            self._sources[(key, index)] = Source(slot, readers)
        return slot

    def release(self, key: AttemptKey, index: int, reader: str) -> None:
        """A reader is done. Unknown chunks and repeats change nothing."""
        source = self._sources.get((key, index))
        if source is None:
            return
        source.readers.discard(reader)
        if not source.readers:
            self._close((key, index))

    def release_all(self, key: AttemptKey, reader: str) -> None:
        for _, index in [name for name in self._sources if name[0] == key]:
            self.release(key, index, reader)

    def read_by(self, key: AttemptKey, reader: str) -> bool:
        """Whether `reader` still has chunks of this attempt to read."""
        return any(name[0] == key and reader in source.readers for name, source in self._sources.items())

    def readers(self, key: AttemptKey, index: int) -> list[str]:
        """Who still reads a chunk. Nobody: it should not be there."""
        source = self._sources.get((key, index))
        return sorted(source.readers) if source else []

    def check_integrity(self) -> None:
        """Raises Internal unless exactly the chunks that somebody reads have a slot."""
        self._ring.check_integrity()
        if {slot.owner for slot in self._ring.taken} != self._sources.keys():
            raise Internal("the slots of the send ring and the chunks that are read do not mirror each other")
        if not all(source.readers for source in self._sources.values()):
            raise Internal("a chunk has a slot and no reader")

    def expire(self, now: float) -> set[AttemptKey]:
        """Closes what outlived its lease. Returns the attempts whose decode worker had not read
        everything."""
        unread: set[AttemptKey] = set()
        for slot in self._ring.expired(now):
            source = self._sources.get(slot.owner)
            if source is not None:
                if DECODE in source.readers:
                    unread.add(slot.owner[0])
                self._close(slot.owner)
        return unread

    def _close(self, name: SourceKey) -> None:
        self._ring.release(self._sources.pop(name).slot)
