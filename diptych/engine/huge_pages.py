"""Weights in huge pages: a decode step reads all of them, and misses the TLB on every small page.

Libraries pack weights into memory of their own, so that we can't choose its pages beforehand. Linux (6.1 and
later) collapses memory into huge pages in place (`madvise(2)`, MADV_COLLAPSE); elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # the mmap module doesn't name it
_MAPS = Path("/proc/self/maps")


def collapse() -> int:
    """Puts this process's private memory into huge pages. Returns the bytes in ranges that were collapsed."""
    advise = getattr(mmap, "MADV_HUGEPAGE", None)
    if advise is None or not _MAPS.exists():
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    for begin, end in _ranges(_MAPS.read_text(encoding="utf-8")):
        madvise(begin, end - begin, advise)
        # Refused for ranges that were never touched, and where huge pages are switched off.
        done += 0 if madvise(begin, end - begin, _MADV_COLLAPSE) else end - begin
    return done


def _ranges(maps: str) -> Iterator[tuple[int, int]]:
    """Begin and end of the whole huge pages in each private, writable, anonymous mapping."""
    for line in maps.splitlines():
        where, access, _, _, inode, *name = line.split(maxsplit=5)
        if access != "rw-p" or inode != "0" or (name and name[0] != "[heap]"):
            continue
        begin, end = (int(address, 16) for address in where.split("-"))
        begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if begin < end:
            yield begin, end
