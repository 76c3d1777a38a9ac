"""What attention on AMX is made of: a pool's keys and values as tiles, and a stretch of them joined to rows.

After FlashAttention-2 (Dao, 2023). Contexts are taken in stretches of 256 positions. For a stretch, the
scores of up to 32 rows are computed into scratch, turned to weights by online softmax, rounded to bf16, and
multiplied with the values:

    keys    [2 x 16 positions]             as right tiles: pairs of a key's elements, a column a position
    values  [32 positions, head_size]      as right tiles: pairs of positions, a column an element
    rows    prefill: 32 positions of one query head;   decode: the query heads that share a KV head
"""

from __future__ import annotations

import numpy as np

from diptych.engine.kernels.amx import (
    STEP,
    TILE_BYTES,
    TILE_ROWS,
    clear,
    load_few,
    load_sums,
    step,
    step_few,
    store_few,
    store_sums,
)
from diptych.engine.kernels.jit import part
from diptych.engine.kernels.paged_attention import Integers
from diptych.engine.kernels.vectors import (
    LANES,
    add,
    exp,
    exp_roughly,
    fill,
    fma,
    higher,
    highest,
    keep_first,
    load,
    load_bf16,
    load_one,
    lone_bf16,
    mul,
    pair_bf16,
    prefetch,
    store,
    store_bf16,
    store_one,
    sub,
    total,
    transpose_pairs,
)

STRETCH = 256
# Bytes between two rows, which a power of two would put into the same few sets of the cache.
SCORES_STEP = STRETCH * 4 + 64
WEIGHTS_STEP = STRETCH * 2 + 64
SCRATCH_BYTES = STEP * (SCORES_STEP + WEIGHTS_STEP + 16) + 64
_VECTOR = LANES * 4
_AHEAD = 2 * STEP
"""Positions that are asked for before a decode needs them."""


def can_tile(head_size: int, block_tokens: int) -> bool:
    """Whether heads are whole steps and no 16 positions lie in two blocks."""
    return head_size % STEP == 0 and block_tokens % TILE_ROWS == 0


@part
def slot_of(table: Integers, position: int, block_tokens: int) -> int:
    """Where a position's key and value are in the pool, in rows."""
    block: int = table[position // block_tokens]
    return block * block_tokens + position % block_tokens


@part
def to_tiles(
    keys: int, values: int, table: Integers, start: int, end: int, key_tiles: int, value_tiles: int,
    head_size: int, slot_bytes: int, block_tokens: int,
) -> None:  # fmt: skip
    """32 positions of a KV head from `start` to their tiles; values from `end` on are zero.

    Asks, a line at a time, for positions further on: the CPU can't tell where the next block lies, and a
    burst of such wishes would stop it.
    """
    lines = head_size // STEP
    for half in range(2):
        position = start + half * TILE_ROWS
        offset = slot_of(table, min(position, end - 1), block_tokens) * slot_bytes
        wish = slot_of(table, min(position + _AHEAD, end - 1), block_tokens) * slot_bytes
        count = max(0, min(TILE_ROWS, end - position))
        if count > 0:
            for at in range(lines):
                target = key_tiles + (half * lines + at) * TILE_BYTES
                transpose_pairs(keys + offset + at * 64, slot_bytes, target)
        for at in range(head_size // LANES):
            target = value_tiles + at * TILE_BYTES + half * TILE_BYTES // 2
            for pair in range(count // 2):
                row = values + offset + 2 * pair * slot_bytes + at * LANES * 2
                pair_bf16(row, row + slot_bytes, target + pair * 64)
                line = wish + (2 * pair + at // lines) * slot_bytes + at % lines * 64
                prefetch(keys + line)
                prefetch(values + line)
            for pair in range(count // 2, TILE_ROWS // 2):
                store(target + pair * 64, fill(np.float32(0)))
            if count % 2:
                row = values + offset + (count - 1) * slot_bytes + at * LANES * 2
                lone_bf16(row, target + count // 2 * 64)


@part
def begin(
    queries: int, step_bytes: int, rows: int, query: int, mixed: int, state: int, head_size: int
) -> None:
    """Copies rows of one head to scratch, and clears what they have mixed."""
    for row in range(rows):
        for at in range(0, head_size * 2, LANES * 2):
            store_bf16(query + row * head_size * 2 + at, load_bf16(queries + row * step_bytes + at))
    for at in range(0, STEP * head_size * 4, _VECTOR):
        store(mixed + at, fill(np.float32(0)))
    for at in range(0, STEP * 4, _VECTOR):
        store(state + at, fill(np.float32(-np.inf)))
        store(state + STEP * 4 + at, fill(np.float32(0)))


@part
def join(
    query: int, mixed: int, scores: int, key_tiles: int, value_tiles: int, count: int, seen: int,
    seen_step: int, rows: int, state: int, head_size: int, few: bool,
) -> None:  # fmt: skip
    """Joins the `count` positions of a stretch to what `rows` rows have mixed so far.

    The first row sees `seen` of them, each row `seen_step` more than the one before. `state` is each row's
    highest score, the sum of its weights, and room for two more of each row. Scratch from `scores` on; what
    lies below `rows` in it means nothing.
    """
    head_bytes, weights = head_size * 2, scores + STEP * SCORES_STEP
    whole = (count + STEP - 1) // STEP * STEP
    for at in range(0, whole, STEP):
        clear()
        for k in range(head_size // STEP):
            tile = key_tiles + at * head_bytes + k * TILE_BYTES
            below = tile + head_size // STEP * TILE_BYTES
            if few:
                step_few(query + k * 64, head_bytes, tile, below)
            else:
                step(query + k * 64, head_bytes, tile, below)
        if few:
            store_few(scores + at * 4, SCORES_STEP)
        else:
            store_sums(scores + at * 4, SCORES_STEP)
    weigh(scores, weights, mixed, state, rows, count, seen, seen_step, head_size)
    for at in range(0, head_size, STEP):
        if few:
            load_few(mixed + at * 4, head_size * 4)
        else:
            load_sums(mixed + at * 4, head_size * 4)
        for position in range(0, whole, STEP):
            tile = value_tiles + position * head_bytes + at // LANES * TILE_BYTES
            if few:
                step_few(weights + position * 2, WEIGHTS_STEP, tile, tile + TILE_BYTES)
            else:
                step(weights + position * 2, WEIGHTS_STEP, tile, tile + TILE_BYTES)
        if few:
            store_few(mixed + at * 4, head_size * 4)
        else:
            store_sums(mixed + at * 4, head_size * 4)


@part
def weigh(
    scores: int, weights: int, mixed: int, state: int, rows: int, count: int, seen: int, seen_step: int,
    head_size: int,
) -> None:  # fmt: skip
    """Scores to weights, and what rows have mixed to the same scale.

    Row by row in passes of their own, because each pass waits for its own result at a row's end.
    """
    whole, scale = (count + STEP - 1) // STEP * STEP, np.float32(head_size**-0.5)
    tops, fades = state + 2 * STEP * 4, state + 3 * STEP * 4
    for row in range(rows):
        line = scores + row * SCORES_STEP
        # Scores beyond are of positions that this row may not see, or of none.
        visible = max(0, min(count, seen + row * seen_step))
        for at in range(visible // LANES * LANES, whole, LANES):
            store(line + at * 4, keep_first(load(line + at * 4), visible - at))
        top, other = load(line), load(line + _VECTOR)
        for at in range(STEP * 4, whole * 4, STEP * 4):
            top, other = higher(top, load(line + at)), higher(other, load(line + at + _VECTOR))
        store_one(tops + row * 4, highest(higher(top, other)))
    for at in range(0, STEP * 4, _VECTOR):
        before = load(state + at)
        raised = higher(before, mul(load(tops + at), fill(scale)))
        fade = exp(sub(before, raised))
        store(state + at, raised)
        store(fades + at, fade)
        store(state + STEP * 4 + at, mul(load(state + STEP * 4 + at), fade))
    for row in range(rows):
        line, target = scores + row * SCORES_STEP, weights + row * WEIGHTS_STEP
        negative = fill(-load_one(state + row * 4))
        summed, other = fill(np.float32(0)), fill(np.float32(0))
        for at in range(0, whole * 4, STEP * 4):
            weight = exp_roughly(fma(load(line + at), fill(scale), negative))
            following = exp_roughly(fma(load(line + at + _VECTOR), fill(scale), negative))
            summed, other = add(summed, weight), add(other, following)
            store_bf16(target + at // 2, weight)
            store_bf16(target + at // 2 + LANES * 2, following)
        address = state + (STEP + row) * 4
        store_one(address, load_one(address) + total(add(summed, other)))
    for row in range(rows):
        fade = fill(load_one(fades + row * 4))
        for at in range(row * head_size * 4, (row + 1) * head_size * 4, _VECTOR):
            store(mixed + at, mul(load(mixed + at), fade))


@part
def finish(mixed: int, state: int, rows: int, out: int, out_step: int, head_size: int) -> None:
    """What rows have mixed, divided by the sums of their weights, to bf16 rows so many bytes apart."""
    for row in range(rows):
        inverse = fill(np.float32(1) / load_one(state + (STEP + row) * 4))
        for at in range(0, head_size * 4, _VECTOR):
            store_bf16(out + row * out_step + at // 2, mul(load(mixed + row * head_size * 4 + at), inverse))
