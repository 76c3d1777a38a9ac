"""Weights in huge pages: a decode step reads all of them, and misses the TLB on every small page.

Libraries pack weights into memory that they take from malloc, whose pages we can't choose one by one. So we
take as much from it beforehand, advise the kernel, and give it back untouched: malloc keeps the addresses,
and the kernel keeps the advice for whoever touches them first.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE_PAGE = 2 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST = (1 << 31) - 1


def reserve(num_bytes: int) -> bool:
    """Has malloc's next `num_bytes` bytes lie in huge pages. False where nothing came of it.

    Call it once, before anything large is allocated. glibc's malloc is told to keep what is freed: it would
    map and fault in a step's activations anew each time.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return False
    library = ctypes.CDLL(None, use_errno=True)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with contextlib.suppress(AttributeError):  # not glibc
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            library.mallopt(parameter, _MOST)
    address = library.malloc(num_bytes)
    if not address:
        return False
    begin = -(-address // HUGE_PAGE) * HUGE_PAGE
    end = (address + num_bytes) // HUGE_PAGE * HUGE_PAGE
    advised = begin < end and library.madvise(begin, end - begin, advice) == 0
    library.free(address)
    return bool(advised)
