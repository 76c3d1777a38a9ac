"""What this machine can do at most: reading memory, and bf16 matrix products.

`python -m bench.drivers.limits THREADS`
"""

from __future__ import annotations

import sys
import time

import torch

from bench.serve import Op, serve

_BYTES = 1 << 29
_SIDE = 2048


def read_bytes_per_s() -> float:
    """Bytes a second that a sum over half a GiB reads."""
    source = torch.ones(_BYTES // 4, dtype=torch.float32)
    source.sum()
    begun = time.perf_counter()
    for _ in range(3):
        source.sum()
    return 3 * _BYTES / (time.perf_counter() - begun)


def gemm_flops_per_s() -> float:
    """Floating point operations a second of a bf16 product of 2048³."""
    left, right = (torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16) for _ in range(2))
    left @ right
    begun = time.perf_counter()
    for _ in range(5):
        left @ right
    return 5 * 2 * _SIDE**3 / (time.perf_counter() - begun)


def _open() -> tuple[dict[str, object], dict[str, Op]]:
    torch.set_num_threads(int(sys.argv[1]))
    return {}, {"read": read_bytes_per_s, "gemm": gemm_flops_per_s}


if __name__ == "__main__":
    serve(_open)
