"""Plain memory for rings and scratch, as spans that a KV channel can register; the digest of its bytes."""

from __future__ import annotations

import ctypes
import mmap

import xxhash

from diptych.domain.ports import MemorySpan


def allocate(num_bytes: int, device: str = "cpu") -> MemorySpan:
    """Zeroed, page-aligned memory (512-byte aligned on a CUDA device), freed with the span's last reference.

    Raises ValueError when `num_bytes` is not positive, MemoryError or OSError when there is not enough.
    """
    if num_bytes <= 0:
        raise ValueError(f"cannot allocate {num_bytes} bytes")
    if device != "cpu":
        return _allocate_on_device(num_bytes, device)
    pages = anonymous_pages(num_bytes)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
    return MemorySpan(address, num_bytes, "cpu", pages)


def anonymous_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone. Raises OSError when there is not enough."""
    # Private, so that no child shares it by accident; anonymous, so that pages come when touched.
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def digest(data: MemorySpan) -> bytes:
    """16-byte XXH3-128 of the bytes, big-endian. Host memory only; raises ValueError otherwise."""
    return xxhash.xxh3_128_digest(data.view())


def _allocate_on_device(num_bytes: int, device: str) -> MemorySpan:
    import torch  # the rest of this module serves processes without torch

    data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return MemorySpan(data.data_ptr(), num_bytes, device, data)
