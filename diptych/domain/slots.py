"""Fixed-size slots of a staging ring: where chunks lie while a peer may read them, or while our read lands.

The ring only keeps books; the memory is whoever's registered it with a channel. A slot is free or taken:

    FREE ──take(owner, now, lease_s)──▶ TAKEN until lease_end ──release(slot)──▶ FREE, generation + 1

A lease bounds how long a *source* keeps a chunk readable for a reader that may have died. It frees nothing by
itself: `expired` lists what ran out, and the caller, who knows whether a pack into the slot is under way,
releases it. Each taking has its own generation, so a release that comes late or twice can't free a slot from
under its next owner. Free slots are reused oldest first: a released chunk's bytes last as long as they can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from diptych.domain.errors import Internal

Owner = TypeVar("Owner", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Slot(Generic[Owner]):
    """One taking of a slot: bytes `offset … offset + num_bytes` of the ring's memory, until `lease_end`."""

    index: int
    generation: int
    owner: Owner
    offset: int
    num_bytes: int
    lease_end: float
    taken_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotAudit:
    """Slots by state; `free + taken == total` always."""

    free: int
    taken: int
    total: int


class SlotRing(Generic[Owner]):
    """Gives out `num_slots` slots of `slot_bytes` bytes. Not thread-safe; it holds no memory."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"a ring needs slots with bytes, not {num_slots} of {slot_bytes}")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._free = deque(range(num_slots))
        self._generations = [0] * num_slots
        self._taken: dict[int, Slot[Owner]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the ring describes."""
        return self.num_slots * self.slot_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, owner: Owner, now: float, lease_s: float) -> Slot[Owner] | None:
        """A free slot, leased until `now + lease_s` (`math.inf`: no end), or None when all are taken."""
        if not self._free:
            return None
        index = self._free.popleft()
        self._generations[index] += 1
        slot = Slot(
            index,
            self._generations[index],
            owner,
            index * self.slot_bytes,
            self.slot_bytes,
            now + lease_s,
            now,
        )
        self._taken[index] = slot
        return slot

    def renew(self, slot: Slot[Owner], now: float, lease_s: float) -> bool:
        """Leases a taken slot anew. False, and nothing changes, when this taking has ended."""
        if not self.holds(slot):
            return False
        self._taken[slot.index] = replace(slot, lease_end=now + lease_s)
        return True

    def release(self, slot: Slot[Owner]) -> bool:
        """Frees a taken slot. False, and nothing changes, when this taking has ended already."""
        if not self.holds(slot):
            return False
        del self._taken[slot.index]
        self._free.append(slot.index)
        return True

    def holds(self, slot: Slot[Owner]) -> bool:
        """Whether this very taking still lasts."""
        current = self._taken.get(slot.index)
        return current is not None and current.generation == slot.generation

    def expired(self, now: float) -> list[Slot[Owner]]:
        """Taken slots whose lease has ended at `now`. They stay taken until released."""
        return [slot for slot in self._taken.values() if slot.lease_end <= now]

    def taken_by(self, owner: Owner) -> list[Slot[Owner]]:
        """Slots of one owner, in the order in which they were taken."""
        return [slot for slot in self._taken.values() if slot.owner == owner]

    @property
    def taken(self) -> tuple[Slot[Owner], ...]:
        """The takings that last, in the order in which they began."""
        return tuple(self._taken.values())

    def audit(self) -> SlotAudit:
        """Counts by state."""
        return SlotAudit(len(self._free), len(self._taken), self.num_slots)

    def check_integrity(self) -> None:
        """Raises Internal unless every slot is either free or taken."""
        if sorted([*self._free, *self._taken]) != list(range(self.num_slots)):
            raise Internal(f"slots are not in exactly one state each: {self.audit()}")
