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

from diptych.engine.kernels.jit import kernel, spread_kernel
from diptych.engine.kernels.vectors import (
    LANES,
    add,
    exp,
    fill,
    fma,
    highest,
    load,
    load_bf16,
    load_one,
    mul,
    prefetch,
    store,
    store_bf16,
    sub,
    total,
    totals,
)

Tables = npt.NDArray[np.int64]
PagedAttention = Callable[[int, int, int, int, int, Tables, Tables], None]
"""(queries, elements between two rows of them, keys, values, out, block tables [sequences, blocks], positions
[sequences]): row i of `out` [sequences, heads * head_size] gets sequence i's attention. Addresses of bf16."""


def paged_attention(
    num_heads: int, num_kv_heads: int, head_size: int, block_tokens: int, num_threads: int
) -> PagedAttention:
    """The kernel for pools of this shape; `head_size` is a multiple of 16. Compiled when first called."""
    attend = _kernel(num_heads, num_kv_heads, head_size, block_tokens)

    @kernel
    def alone(
        queries: int, row_step: int, keys: int, values: int, out: int, tables: Tables, ends: Tables
    ) -> None:
        for row in range(len(ends)):
            attend(queries, row_step, keys, values, out, tables, ends, row, 0, num_kv_heads)

    @spread_kernel
    def spread(
        queries: int, row_step: int, keys: int, values: int, out: int, tables: Tables, ends: Tables
    ) -> None:
        for item in numba.prange(len(ends) * num_kv_heads):
            row, head = item // num_kv_heads, item % num_kv_heads
            attend(queries, row_step, keys, values, out, tables, ends, row, head, head + 1)

    return alone if num_threads == 1 else spread


def _kernel(num_heads: int, num_kv_heads: int, head_size: int, block_tokens: int) -> Callable[..., None]:
    """One sequence's row, for the KV heads from `first` to `last`."""
    group = num_heads // num_kv_heads
    head_vectors = head_size // LANES
    slot_bytes = num_kv_heads * head_size * 2
    head_bytes, f32_bytes = head_size * 2, head_size * 4
    scale = np.float32(head_size**-0.5)
    lowest = np.float32(-np.inf)
    zero, one = np.float32(0), np.float32(1)
    vector_bytes = LANES * 4

    @kernel
    def convert(slots: npt.NDArray[np.int64], count: int, source: int, tile: int) -> None:
        """A head's rows of a tile as fp32."""
        for t in range(count):
            for c in range(head_vectors):
                store(tile + t * f32_bytes + c * vector_bytes, load_bf16(source + slots[t] + c * 32))

    @kernel
    def score(query: int, tile: int, count: int, sums: int, scores: int) -> None:
        """Products of one query with a tile's keys; minus infinity beyond them."""
        for t in range(count):
            row = tile + t * f32_bytes
            found = mul(load(query), load(row))
            for c in range(1, head_vectors):
                found = fma(load(query + c * vector_bytes), load(row + c * vector_bytes), found)
            store(sums + t * vector_bytes, found)
        for t in range(count, LANES):
            store(sums + t * vector_bytes, fill(lowest))
        store(scores, totals(sums))

    @kernel
    def mix(weights: int, tile: int, count: int, fade: np.float32, mixed: int) -> None:
        """mixed = mixed * fade + weights @ tile. Four sums in turn, because one would wait for itself."""
        for c in range(head_vectors):
            where, row, weight = mixed + c * vector_bytes, tile + c * vector_bytes, weights
            a = mul(load(where), fill(fade))
            b = fill(zero)
            d, e = b, b
            for _ in range(count // 4):
                a = fma(fill(load_one(weight)), load(row), a)
                b = fma(fill(load_one(weight + 4)), load(row + f32_bytes), b)
                d = fma(fill(load_one(weight + 8)), load(row + 2 * f32_bytes), d)
                e = fma(fill(load_one(weight + 12)), load(row + 3 * f32_bytes), e)
                row += 4 * f32_bytes
                weight += 16
            for _ in range(count % 4):
                a = fma(fill(load_one(weight)), load(row), a)
                row += f32_bytes
                weight += 4
            store(where, add(add(a, b), add(d, e)))

    @kernel
    def attend(
        queries: int, row_step: int, keys: int, values: int, out: int,
        tables: Tables, ends: Tables, row: int, first: int, last: int,
    ) -> None:  # fmt: skip
        floats = np.empty(2 * num_heads * head_size + LANES * (head_size + LANES + 2), np.float32)
        scaled = (floats.ctypes.data + 63) // 64 * 64
        mixed = scaled + num_heads * f32_bytes
        tile = mixed + num_heads * f32_bytes
        sums = tile + LANES * f32_bytes
        scores = sums + LANES * vector_bytes
        slots, following = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
        highests = np.full(num_heads, lowest, np.float32)
        weight_sums = np.zeros(num_heads, np.float32)
        query = queries + row * row_step * 2
        for c in range(first * group * head_vectors, last * group * head_vectors):
            store(scaled + c * vector_bytes, mul(load_bf16(query + c * 32), fill(scale)))
            store(mixed + c * vector_bytes, fill(zero))
        end = ends[row]
        for t in range(min(LANES, end)):
            following[t] = (tables[row, t // block_tokens] * block_tokens + t % block_tokens) * slot_bytes
        for start in range(0, end, LANES):
            count = min(LANES, end - start)
            for t in range(LANES):
                slots[t] = following[t]
                position = min(start + LANES + t, end - 1)
                block = tables[row, position // block_tokens]
                following[t] = (block * block_tokens + position % block_tokens) * slot_bytes
            for head in range(first, last):
                offset = head * head_bytes
                convert(slots, count, keys + offset, tile)
                for t in range(LANES):
                    for line in range(0, head_bytes, 64):
                        prefetch(keys + offset + following[t] + line)
                        prefetch(values + offset + following[t] + line)
                for h in range(head * group, (head + 1) * group):
                    score(scaled + h * f32_bytes, tile, count, sums, scores + (h - head * group) * vector_bytes)
                convert(slots, count, values + offset, tile)
                for h in range(head * group, (head + 1) * group):
                    where = scores + (h - head * group) * vector_bytes
                    found = load(where)
                    raised = max(highests[h], highest(found))
                    fade = total(exp(fill(highests[h] - raised))) / np.float32(LANES)
                    weights = exp(sub(found, fill(raised)))
                    store(where, weights)
                    weight_sums[h] = weight_sums[h] * fade + total(weights)
                    highests[h] = raised
                    mix(where, tile, count, fade, mixed + h * f32_bytes)
        for h in range(first * group, last * group):
            inverse = fill(one / weight_sums[h])
            for c in range(head_vectors):
                done = mul(load(mixed + h * f32_bytes + c * vector_bytes), inverse)
                store_bf16(out + (row * num_heads + h) * head_bytes + c * 32, done)

    return attend
