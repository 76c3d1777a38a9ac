"""Reserving huge pages is a wish: it never fails, and memory stays as it is."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.engine import huge_pages


def test_where_there_are_none_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not huge_pages.reserve(64 << 20)


def test_less_than_a_page_is_no_reservation() -> None:
    assert not huge_pages.reserve(4096)
    assert not huge_pages.reserve(1 << 62)


PROGRAM = """
import ctypes
from diptych.engine import huge_pages
assert huge_pages.reserve(64 << 20)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
address = library.malloc(ctypes.c_size_t(32 << 20))
ctypes.memset(address, 1, 32 << 20)
(line,) = (line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages:"))
print(int(line.split()[1]) // 1024)
"""


def test_the_next_large_allocation_lies_in_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    has_any = enabled.exists() and "[never]" not in enabled.read_text()
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) >= (16 if has_any else 0)
