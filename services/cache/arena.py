"""Room in one piece of memory for chunks of any size: best fit, with neighbours joined when they are freed.

    taken and free runs tile the arena; no two free runs touch

    │ taken │   free   │ taken │ taken │      free      │

Models of different shape lie beside each other, so sizes are only bytes, rounded up to `ALIGN`. Best fit lets
a chunk take the hole that another of its size left, which is the ordinary case, and spares the large runs.
The arena only keeps books; it holds no memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final

from diptych.domain.errors import Internal

ALIGN: Final = 64
"""Every extent starts and ends at a multiple of this: a cache line, and enough for any vector load."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Bytes `offset … end` of the arena."""

    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def holds(self, other: Extent) -> bool:
        """Whether `other` lies inside."""
        return self.offset <= other.offset and other.end <= self.end


class Arena:
    """Extents of `num_bytes` bytes. Not thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < ALIGN or num_bytes % ALIGN:
            raise ValueError(f"an arena needs a multiple of {ALIGN} bytes, not {num_bytes}")
        self.num_bytes = num_bytes
        self._free = [Extent(0, num_bytes)]  # by offset
        self._taken: dict[int, Extent] = {}

    @property
    def num_free_bytes(self) -> int:
        return sum(run.num_bytes for run in self._free)

    def take(self, num_bytes: int) -> Extent | None:
        """Room for `num_bytes` bytes in the smallest free run that has it (the first of equals), or None."""
        size = rounded(num_bytes)
        run = min(
            (run for run in self._free if run.num_bytes >= size), key=lambda run: run.num_bytes, default=None
        )
        if run is None:
            return None
        at = bisect_left(self._free, run)
        rest = Extent(run.offset + size, run.num_bytes - size)
        self._free[at : at + 1] = [rest] if rest.num_bytes else []
        extent = self._taken[run.offset] = Extent(run.offset, size)
        return extent

    def free(self, extent: Extent) -> Extent:
        """Frees what was taken. Returns the free run that it became part of. Raises Internal if not taken."""
        if self._taken.get(extent.offset) != extent:
            raise Internal(f"free: {extent} is not taken")
        del self._taken[extent.offset]
        at = bisect_left(self._free, extent)
        first, last = extent, extent
        if at < len(self._free) and self._free[at].offset == extent.end:
            last = self._free.pop(at)
        if at > 0 and self._free[at - 1].end == extent.offset:
            first = self._free.pop(at - 1)
        run = Extent(first.offset, last.end - first.offset)
        insort(self._free, run)
        return run

    def copy(self) -> Arena:
        """The same books again, to try something out on."""
        twin = Arena(self.num_bytes)
        twin._free, twin._taken = self._free.copy(), self._taken.copy()
        return twin

    def check_integrity(self) -> None:
        """Raises Internal unless taken and free runs tile the arena and no two free runs touch."""
        runs = sorted([*self._free, *self._taken.values()])
        ends = [0, *(run.end for run in runs)]
        if [run.offset for run in runs] != ends[:-1] or ends[-1] != self.num_bytes:
            raise Internal("taken and free runs do not tile the arena")
        if any(run.num_bytes < 1 or run.num_bytes % ALIGN for run in runs):
            raise Internal("a run is empty or not aligned")
        starts = {run.offset for run in self._free}
        if any(run.end in starts for run in self._free):
            raise Internal("two free runs touch")


def rounded(num_bytes: int) -> int:
    """Bytes that a chunk of `num_bytes` takes in an arena. Raises ValueError unless there are any."""
    if num_bytes < 1:
        raise ValueError(f"room for {num_bytes} bytes")
    return -(-num_bytes // ALIGN) * ALIGN
