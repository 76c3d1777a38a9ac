"""Attention of single new tokens over a paged pool in bf16, on AMX: `paged_attention` for CPUs that have it.

Tiles are made of one stretch at a time, in the cache, and are gone when the next one comes.
"""

from __future__ import annotations

import numba
import numpy as np

from diptych.engine.kernels.amx import STEP, configure, release
from diptych.engine.kernels.jit import kernel, spread_kernel
from diptych.engine.kernels.paged_attention import Integers, PagedAttention
from diptych.engine.kernels.tile_parts import (
    SCORES_STEP,
    SCRATCH_BYTES,
    STRETCH,
    WEIGHTS_STEP,
    begin,
    finish,
    join,
    to_tiles,
)


def tiled_decode(
    num_heads: int, num_kv_heads: int, head_size: int, block_tokens: int, num_threads: int
) -> PagedAttention:
    """The kernel for one new token of each of many sequences; else as `tiled_prefill`.

    The query heads that share a KV head are at most 16.
    """
    group, slot_bytes, head_bytes = num_heads // num_kv_heads, num_kv_heads * head_size * 2, head_size * 2
    head_tiles, head_room = STRETCH * head_bytes, STEP * (head_size * 6 + 16)

    def attention(
        queries: int, row_step: int, keys: int, values: int, out: int, tables: Integers, ends: Integers
    ) -> None:
        # Heads of a position lie side by side, and are best read so.
        splits = num_kv_heads if len(ends) < num_threads else 1
        heads = num_kv_heads // splits
        for item in numba.prange(len(ends) * splits):
            row, first = item // splits, item % splits * heads
            end, table = ends[row], tables[row]
            scratch = np.empty((SCRATCH_BYTES + heads * (head_room + 2 * head_tiles)) // 4, np.float32)
            scores = (scratch.ctypes.data + 63) // 64 * 64
            rooms = scores + STEP * (SCORES_STEP + WEIGHTS_STEP)
            tiles = rooms + heads * head_room
            source = queries + (row * row_step + first * group * head_size) * 2
            target = out + (row * num_heads + first * group) * head_bytes
            for head in range(heads):
                query = rooms + head * head_room
                mixed = query + STEP * head_bytes
                state = mixed + STEP * head_size * 4
                begin(source + head * group * head_bytes, head_bytes, group, query, mixed, state, head_size)
            configure()
            for position in range(0, end, STRETCH):
                count = min(STRETCH, end - position)
                for piece in range(0, count, STEP):
                    for head in range(heads):
                        offset, tile = (first + head) * head_bytes, tiles + 2 * head * head_tiles
                        to_tiles(
                            keys + offset, values + offset, table, position + piece, end,
                            tile + piece * head_bytes, tile + head_tiles + piece * head_bytes,
                            head_size, slot_bytes, block_tokens,
                        )  # fmt: skip
                for head in range(heads):
                    query, tile = rooms + head * head_room, tiles + 2 * head * head_tiles
                    mixed = query + STEP * head_bytes
                    join(
                        query, mixed, scores, tile, tile + head_tiles, count, count, 0, group,
                        mixed + STEP * head_size * 4, head_size, True,
                    )  # fmt: skip
            release()
            for head in range(heads):
                mixed = rooms + head * head_room + STEP * head_bytes
                state = mixed + STEP * head_size * 4
                finish(mixed, state, group, target + head * group * head_bytes, head_bytes, head_size)
            scratch[0] = 0.0  # numba frees an array after its last use, and knows nothing of addresses

    return kernel(attention) if num_threads == 1 else spread_kernel(attention)
