"""Attention of single new tokens over a paged pool in bf16, without gathering it first.

For each sequence, tiles of 16 positions in order. A tile's keys and values are turned to fp32 in scratch
once for all query heads that share them, and joined to what came before by online softmax (Milakov and
Gimelshein, 2018). While one tile is computed, the lines of the next are asked for: its blocks lie anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

from diptych.engine.kernels.jit import kernel, part, spread_kernel
from diptych.engine.kernels.tiles import VECTOR, Offsets, ask, mix, score, unpack
from diptych.engine.kernels.vectors import (
    LANES,
    exp,
    fill,
    highest,
    load,
    load_bf16,
    mul,
    store,
    store_bf16,
    sub,
    total,
)

Integers = npt.NDArray[np.int64]
Floats32 = npt.NDArray[np.float32]
PagedAttention = Callable[[int, int, int, int, int, Integers, Integers], None]
"""(queries, elements between two rows of them, keys, values, out, block tables [sequences, blocks], positions
[sequences]): row i of `out` [sequences, heads * head_size] gets sequence i's attention. Addresses of bf16."""


def paged_attention(
    num_heads: int, num_kv_heads: int, head_size: int, block_tokens: int, num_threads: int
) -> PagedAttention:
    """The kernel for queries and a pool of this shape, compiled when first called.

    `head_size` is a multiple of 16. Several threads share sequences and KV heads.
    """

    splits = 1 if num_threads == 1 else num_kv_heads

    def attention(
        queries: int, row_step: int, keys: int, values: int, out: int, tables: Integers, ends: Integers
    ) -> None:
        attend_rows(
            queries, row_step, keys, values, out, tables, ends, splits,
            num_heads, num_kv_heads, head_size, block_tokens,
        )  # fmt: skip

    return kernel(attention) if num_threads == 1 else spread_kernel(attention)


@part
def attend_rows(
    queries: int, row_step: int, keys: int, values: int, out: int, tables: Integers, ends: Integers,
    splits: int, num_heads: int, num_kv_heads: int, head_size: int, block_tokens: int,
) -> None:  # fmt: skip
    """See `PagedAttention`. A row's KV heads are one piece of work, or as many as `splits`."""
    for item in numba.prange(len(ends) * splits):
        row, first = item // splits, item % splits * (num_kv_heads // splits)
        query, target = queries + row * row_step * 2, out + row * num_heads * head_size * 2
        _attend(
            query, keys, values, target, tables[row], ends[row], first, first + num_kv_heads // splits,
            num_heads, num_kv_heads, head_size, block_tokens,
        )  # fmt: skip


@part
def _attend(
    query: int, keys: int, values: int, out: int, table: Integers, end: int, first: int, last: int,
    num_heads: int, num_kv_heads: int, head_size: int, block_tokens: int,
) -> None:  # fmt: skip
    """One sequence, for the KV heads from `first` to `last`."""
    group, head_f32 = num_heads // num_kv_heads, head_size * 4
    # Scratch: scaled queries and what they have mixed, [heads, head_size] each; and what `_join` needs.
    floats = np.empty(2 * num_heads * head_size + LANES * (head_size + LANES + group + 1), np.float32)
    scaled = (floats.ctypes.data + 63) // 64 * 64
    mixed, tile = scaled + num_heads * head_f32, scaled + 2 * num_heads * head_f32
    highests, sums = np.full(num_heads, -np.inf, np.float32), np.zeros(num_heads, np.float32)
    here, following = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    for at in range(first * group * head_f32, last * group * head_f32, VECTOR):
        store(scaled + at, mul(load_bf16(query + at // 2), fill(np.float32(head_size**-0.5))))
        store(mixed + at, fill(np.float32(0)))
    _locate(table, 0, end, following, block_tokens, num_kv_heads * head_size * 2)
    for start in range(0, end, LANES):
        here[:] = following
        _locate(table, start + LANES, end, following, block_tokens, num_kv_heads * head_size * 2)
        for head in range(first, last):
            at, offset = head * group * head_f32, head * head_size * 2
            _join(
                scaled + at, mixed + at, tile, keys + offset, values + offset, here, following,
                min(LANES, end - start), highests, sums, head * group, group, head_size,
            )  # fmt: skip
    for h in range(first * group, last * group):
        inverse = fill(np.float32(1) / sums[h])
        for at in range(h * head_f32, (h + 1) * head_f32, VECTOR):
            store_bf16(out + at // 2, mul(load(mixed + at), inverse))
    floats[0] = 0.0  # numba frees an array after its last use, and knows nothing of addresses


@part
def _locate(
    table: Integers, start: int, end: int, offsets: Offsets, block_tokens: int, slot_bytes: int
) -> None:
    """Byte offsets of the 16 positions from `start`; of the last position for those from `end` on."""
    for t in range(LANES):
        position = min(start + t, end - 1)
        offsets[t] = (table[position // block_tokens] * block_tokens + position % block_tokens) * slot_bytes


@part
def _join(
    queries: int, mixed: int, tile: int, keys: int, values: int, here: Offsets, following: Offsets,
    count: int, highests: Floats32, sums: Floats32, h: int, group: int, head_size: int,
) -> None:  # fmt: skip
    """Joins a tile of one KV head to what its query heads, from `h` on, have mixed so far.

    Scratch from `tile` on: the tile, 16 vectors of sums, and the group's scores.
    """
    head_f32 = head_size * 4
    vectors = tile + LANES * head_f32
    unpack(here, count, keys, tile, head_size)
    ask(following, keys, head_size)
    ask(following, values, head_size)
    for g in range(group):
        score(queries + g * head_f32, tile, count, vectors, vectors + (LANES + g) * VECTOR, head_size)
    unpack(here, count, values, tile, head_size)
    for g in range(group):
        scores = vectors + (LANES + g) * VECTOR
        found = load(scores)
        raised = max(highests[h + g], highest(found))
        fade = np.float32(1)
        if raised > highests[h + g]:
            fade = total(exp(fill(highests[h + g] - raised))) / np.float32(LANES)
        weights = exp(sub(found, fill(raised)))
        store(scores, weights)
        sums[h + g] = sums[h + g] * fade + total(weights)
        highests[h + g] = raised
        mix(scores, tile, count, fade, mixed + g * head_f32, head_size)
