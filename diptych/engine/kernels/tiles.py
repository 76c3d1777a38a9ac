"""Attention's arithmetic on one tile: 16 positions of one KV head, as fp32 [16, head_size] in scratch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diptych.engine.kernels.jit import part
from diptych.engine.kernels.vectors import (
    LANES,
    add,
    fill,
    fma,
    load,
    load_bf16,
    load_one,
    mul,
    prefetch,
    store,
    totals,
)

VECTOR = LANES * 4
"""Bytes of a vector in fp32; twice as many as of one in bf16."""

Offsets = npt.NDArray[np.int64]
"""Where the 16 rows of a tile lie in a pool, in bytes."""


@part
def unpack(rows: Offsets, count: int, source: int, tile: int, head_size: int) -> None:
    """The first `count` rows of the pool's head at `source`, to the tile."""
    for t in range(count):
        for c in range(0, head_size * 4, VECTOR):
            store(tile + (t * head_size * 4 + c), load_bf16(source + rows[t] + c // 2))


@part
def ask(rows: Offsets, source: int, head_size: int) -> None:
    """Has the cache lines of the pool's head at `source` fetched."""
    for t in range(LANES):
        for line in range(0, head_size * 2, 64):
            prefetch(source + rows[t] + line)


@part
def score(query: int, tile: int, count: int, sums: int, scores: int, head_size: int) -> None:
    """16 products of a query with a tile of keys, to `scores`; minus infinity beyond `count`. `sums` is room
    for 16 vectors."""
    for t in range(count):
        row = tile + t * head_size * 4
        found = mul(load(query), load(row))
        for c in range(VECTOR, head_size * 4, VECTOR):
            found = fma(load(query + c), load(row + c), found)
        store(sums + t * VECTOR, found)
    for t in range(count, LANES):
        store(sums + t * VECTOR, fill(np.float32(-np.inf)))
    store(scores, totals(sums))


@part
def mix(weights: int, tile: int, count: int, fade: np.float32, mixed: int, head_size: int) -> None:
    """mixed = mixed * fade + weights @ tile of values.

    Four sums in turn, because each addition would wait for the one before.
    """
    row_bytes = head_size * 4
    for c in range(0, row_bytes, VECTOR):
        row, weight = tile + c, weights
        a, b = mul(load(mixed + c), fill(fade)), fill(np.float32(0))
        d, e = b, b
        for _ in range(count // 4):
            a = fma(fill(load_one(weight)), load(row), a)
            b = fma(fill(load_one(weight + 4)), load(row + row_bytes), b)
            d = fma(fill(load_one(weight + 8)), load(row + 2 * row_bytes), d)
            e = fma(fill(load_one(weight + 12)), load(row + 3 * row_bytes), e)
            row += 4 * row_bytes
            weight += 16
        for _ in range(count % 4):
            a = fma(fill(load_one(weight)), load(row), a)
            row += row_bytes
            weight += 4
        store(mixed + c, add(add(a, b), add(d, e)))
