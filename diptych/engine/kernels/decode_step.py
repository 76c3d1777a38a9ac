"""All layers of a Llama for a few decode rows as one call, on int4 matrices.

Through torch, a step at batch 1 spends a fifth of its time between its operations: each layer's weights push
the interpreter out of the caches. Here nothing runs between them. Roundings are those of the batched form:
rows are bf16 between operations, and fp32 within.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.engine.kernels.int4 import GROUP, ROWS_AT_ONCE, multiply, multiply_spread, sum_groups
from diptych.engine.kernels.jit import kernel, part, spread_kernel
from diptych.engine.kernels.paged_attention import Integers, attend_rows
from diptych.engine.kernels.rows import (
    add_norm,
    add_to_rows,
    gate,
    narrow,
    norm,
    rotate_and_keep_rows,
    widen,
)

LayerTable = npt.NDArray[np.int64]
"""[layers, 9] addresses: input norm, QKV, its bias or 0, output projection, feed-forward norm, gate and up,
down, the layer's keys, its values. Matrices are int4, all else is bf16."""

DecodeStep = Callable[..., None]
"""(layers, hidden bf16 [rows, hidden], what the last layer adds to it bf16 [rows, hidden], positions int64
[rows], cosines, sines, slots int64 [rows], block tables [rows, blocks], lengths with the new token [rows],
eps). Reads and changes `hidden`; all but arrays and eps are addresses."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is compiled for."""

    hidden: int
    ff: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_tokens: int
    num_threads: int


def decode_step(shape: StepShape) -> DecodeStep:
    """The step, compiled when first called."""
    hidden_size, ff, num_threads = shape.hidden, shape.ff, shape.num_threads
    num_heads, num_kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    block_tokens, splits = shape.block_tokens, 1 if num_threads == 1 else shape.num_kv_heads
    query_size, qkv_size = num_heads * head_size, (num_heads + 2 * num_kv_heads) * head_size
    widest = max(2 * ff, qkv_size, hidden_size)

    def step(
        layers: LayerTable, hidden: int, delta: int, positions: int, cosines: int, sines: int, slots: int,
        tables: Integers, ends: Integers, eps: float,
    ) -> None:  # fmt: skip
        rows = len(ends)
        room = rows if rows == 1 else -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE
        wide = np.zeros(room * (2 * widest + widest // GROUP), np.float32)
        narrows = np.zeros(rows * 2 * widest, np.uint16)
        scratch = wide.ctypes.data
        a = narrows.ctypes.data
        b = a + rows * widest * 2
        norm(hidden, layers[0, 0], a, rows, hidden_size, eps)
        for i in range(len(layers)):
            if i > 0:
                add_norm(hidden, delta, layers[i, 0], a, rows, hidden_size, eps)
            _apply(layers[i, 1], qkv_size, hidden_size, a, b, rows, room, scratch, num_threads)
            if layers[i, 2] != 0:
                add_to_rows(b, layers[i, 2], rows, qkv_size)
            rotate_and_keep_rows(
                b, rows, positions, cosines, sines, slots, layers[i, 7], layers[i, 8],
                num_heads, num_kv_heads, head_size,
            )  # fmt: skip
            attend_rows(
                b, qkv_size, layers[i, 7], layers[i, 8], a, tables, ends, splits,
                num_heads, num_kv_heads, head_size, block_tokens,
            )  # fmt: skip
            _apply(layers[i, 3], hidden_size, query_size, a, delta, rows, room, scratch, num_threads)
            add_norm(hidden, delta, layers[i, 4], a, rows, hidden_size, eps)
            _apply(layers[i, 5], 2 * ff, hidden_size, a, b, rows, room, scratch, num_threads)
            gate(b, a, rows, ff)
            _apply(layers[i, 6], hidden_size, ff, a, delta, rows, room, scratch, num_threads)
        wide[0], narrows[0] = (
            0.0,
            0,
        )  # numba frees an array after its last use, and knows nothing of addresses

    return kernel(step) if num_threads == 1 else spread_kernel(step)


@part
def _apply(
    matrix: int, num_outputs: int, num_inputs: int, x: int, out: int, rows: int, room: int, scratch: int,
    num_threads: int,
) -> None:  # fmt: skip
    """From bf16 rows to bf16 rows; `scratch` has room for `room` rows of inputs, their sums, and outputs."""
    sums = scratch + room * num_inputs * 4
    found = sums + room * num_inputs // GROUP * 4
    widen(x, scratch, rows * num_inputs)
    sum_groups(scratch, sums, room, num_inputs)
    if num_threads == 1:
        multiply(matrix, num_outputs, num_inputs, scratch, sums, found, rows)
    else:
        multiply_spread(matrix, num_outputs, num_inputs, scratch, sums, found, rows)
    narrow(found, out, rows * num_outputs)
