"""Attention of a prompt's piece over a paged pool in bf16, on AMX.

Tiles of the whole context are made once a layer, for all rows and query heads, by a kernel of its own: within
one, numba may join or reorder two parallel loops when it takes them to be independent, and it knows nothing
of addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from diptych.engine.kernels.amx import STEP, configure, release
from diptych.engine.kernels.jit import kernel, spread_kernel
from diptych.engine.kernels.paged_attention import Integers
from diptych.engine.kernels.tile_parts import SCRATCH_BYTES, STRETCH, begin, finish, join, to_tiles

TiledPrefill = Callable[[int, int, int, int, int, int, int, Integers], None]
"""(queries, elements between two rows of them, keys, values, out [rows, heads * head_size], rows, the first
row's position, block table). Addresses of bf16."""
_MakeTiles = Callable[[int, int, Integers, int, int, int], None]
_Attend = Callable[[int, int, int, int, int, int, int], None]


def tiled_prefill(
    num_heads: int, num_kv_heads: int, head_size: int, block_tokens: int, num_threads: int
) -> TiledPrefill:
    """The kernel for one piece of a prompt, compiled when first called; for shapes that `can_tile`."""
    make = _make_tiles(num_kv_heads, head_size, block_tokens, num_threads)
    attend = _attend(num_heads, num_kv_heads, head_size, num_threads)
    position_bytes = num_kv_heads * head_size * 2

    def attention(
        queries: int, row_step: int, keys: int, values: int, out: int, num_rows: int, start: int,
        table: Integers,
    ) -> None:  # fmt: skip
        end = start + num_rows
        half = -(-end // STEP) * STEP * position_bytes
        room = np.empty(2 * half + 64, np.uint8)
        key_tiles = (room.ctypes.data + 63) // 64 * 64
        make(keys, values, table, end, key_tiles, key_tiles + half)
        attend(queries, row_step, out, num_rows, start, key_tiles, key_tiles + half)

    return attention


def _make_tiles(num_kv_heads: int, head_size: int, block_tokens: int, num_threads: int) -> _MakeTiles:
    """(keys, values, block table, context, room for tiles of keys, and of values)"""
    slot_bytes, head_bytes = num_kv_heads * head_size * 2, head_size * 2

    def make(keys: int, values: int, table: Integers, end: int, key_tiles: int, value_tiles: int) -> None:
        num_pieces = (end + STEP - 1) // STEP
        for item in numba.prange(num_kv_heads * num_pieces):
            head, piece = item // num_pieces, item % num_pieces
            at = item * STEP * head_bytes
            to_tiles(
                keys + head * head_bytes, values + head * head_bytes, table, piece * STEP, end,
                key_tiles + at, value_tiles + at, head_size, slot_bytes, block_tokens,
            )  # fmt: skip

    return kernel(make) if num_threads == 1 else spread_kernel(make)


def _attend(num_heads: int, num_kv_heads: int, head_size: int, num_threads: int) -> _Attend:
    """(queries, elements between two rows of them, out, rows, the first row's position, tiles of keys, of
    values)"""
    group, head_bytes = num_heads // num_kv_heads, head_size * 2

    def attend(
        queries: int, row_step: int, out: int, num_rows: int, start: int, key_tiles: int, value_tiles: int
    ) -> None:
        num_pieces = (start + num_rows + STEP - 1) // STEP
        num_tiles = (num_rows + STEP - 1) // STEP
        for item in numba.prange(num_heads * num_tiles):
            head, first = item // num_tiles, item % num_tiles * STEP
            at = head // group * num_pieces * STEP * head_bytes
            rows = min(STEP, num_rows - first)
            scratch = np.empty((SCRATCH_BYTES + STEP * head_size * 6) // 4, np.float32)
            query = (scratch.ctypes.data + 63) // 64 * 64
            mixed = query + STEP * head_bytes
            scores = mixed + STEP * (head_size + 4) * 4
            state = mixed + STEP * head_size * 4
            source = queries + (first * row_step + head * head_size) * 2
            begin(source, row_step * 2, rows, query, mixed, state, head_size)
            configure()
            last = start + first + rows
            for position in range(0, last, STRETCH):
                count = min(STRETCH, last - position)
                join(
                    query, mixed, scores, key_tiles + at + position * head_bytes,
                    value_tiles + at + position * head_bytes, count, start + first - position + 1, 1, rows,
                    state, head_size, False,
                )  # fmt: skip
            release()
            target = out + (first * num_heads + head) * head_bytes
            finish(mixed, state, rows, target, num_heads * head_bytes, head_size)
            scratch[0] = 0.0  # numba frees an array after its last use, and knows nothing of addresses

    return kernel(attend) if num_threads == 1 else spread_kernel(attend)
