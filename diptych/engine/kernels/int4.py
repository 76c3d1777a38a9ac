"""Products of a few rows with a matrix in 4 bits, bound by the reading of the matrix.

    matrix   for each 16 outputs a block
    block    for each 32 inputs a group
    group    16 scales and 16 offsets in bf16; then for each pair of inputs 16 bytes, one an output: the even
             input's number in the low four bits, the odd one's in the high four

A weight is `number * scale + offset`, 5 bits in all. Lanes are outputs, so that nothing is added across
lanes, and an offset meets the sum of its group's inputs.
"""

from __future__ import annotations

import numba
import numpy as np

from diptych.engine.kernels.jit import kernel, part, spread_kernel
from diptych.engine.kernels.vectors import (
    LANES,
    add,
    fill,
    fma,
    load,
    load_bf16,
    load_nibbles,
    load_one,
    prefetch,
    store,
    store_one,
    total,
)

GROUP = 32
"""Inputs that share a scale and an offset."""
GROUP_BYTES = 2 * 2 * LANES + GROUP // 2 * LANES
ROWS_AT_ONCE = 4
"""Of several rows, this many share one reading of the matrix."""
_AHEAD = 8 * GROUP_BYTES


@kernel
def sum_groups(x: int, sums: int, num_rows: int, num_inputs: int) -> None:
    """Of rows `x` fp32 [rows, inputs], the sum of each group, to `sums` fp32 [rows, inputs / 32]."""
    for group in range(num_rows * num_inputs // GROUP):
        at = x + group * GROUP * 4
        store_one(sums + group * 4, total(add(load(at), load(at + LANES * 4))))


@part
def _ask(block: int) -> None:
    """Has the lines of a later group fetched: the CPU's own prefetching stops at each small page."""
    for line in range(0, GROUP_BYTES, 64):
        prefetch(block + _AHEAD + line)


@part
def _one_row(block: int, num_groups: int, x: int, sums: int, out: int) -> None:
    done = fill(np.float32(0))
    for group in range(num_groups):
        even, odd = fill(np.float32(0)), fill(np.float32(0))
        _ask(block)
        for pair in range(GROUP // 2):
            numbers, at = block + 4 * LANES + pair * LANES, x + pair * 8
            even = fma(load_nibbles(numbers, 0), fill(load_one(at)), even)
            odd = fma(load_nibbles(numbers, 4), fill(load_one(at + 4)), odd)
        done = fma(load_bf16(block), add(even, odd), done)
        done = fma(load_bf16(block + 2 * LANES), fill(load_one(sums + group * 4)), done)
        block += GROUP_BYTES
        x += GROUP * 4
    store(out, done)


@part
def _four_rows(block: int, num_groups: int, x: int, sums: int, out: int, out_step: int) -> None:
    """`out_step`: bytes between two rows of `out`."""
    zero = fill(np.float32(0))
    x_step, sum_step = num_groups * GROUP * 4, num_groups * 4
    done0, done1, done2, done3 = zero, zero, zero, zero
    for group in range(num_groups):
        sum0, sum1, sum2, sum3 = zero, zero, zero, zero
        _ask(block)
        for pair in range(GROUP // 2):
            numbers, at = block + 4 * LANES + pair * LANES, x + pair * 8
            even, odd = load_nibbles(numbers, 0), load_nibbles(numbers, 4)
            sum0 = fma(odd, fill(load_one(at + 4)), fma(even, fill(load_one(at)), sum0))
            at += x_step
            sum1 = fma(odd, fill(load_one(at + 4)), fma(even, fill(load_one(at)), sum1))
            at += x_step
            sum2 = fma(odd, fill(load_one(at + 4)), fma(even, fill(load_one(at)), sum2))
            at += x_step
            sum3 = fma(odd, fill(load_one(at + 4)), fma(even, fill(load_one(at)), sum3))
        scales, offsets, at = load_bf16(block), load_bf16(block + 2 * LANES), sums + group * 4
        done0 = fma(scales, sum0, fma(offsets, fill(load_one(at)), done0))
        done1 = fma(scales, sum1, fma(offsets, fill(load_one(at + sum_step)), done1))
        done2 = fma(scales, sum2, fma(offsets, fill(load_one(at + 2 * sum_step)), done2))
        done3 = fma(scales, sum3, fma(offsets, fill(load_one(at + 3 * sum_step)), done3))
        block += GROUP_BYTES
        x += GROUP * 4
    store(out, done0)
    store(out + out_step, done1)
    store(out + 2 * out_step, done2)
    store(out + 3 * out_step, done3)


@part
def _block(
    matrix: int, index: int, num_outputs: int, num_inputs: int, x: int, sums: int, out: int, num_rows: int
) -> None:
    """Outputs 16 * index to 16 * index + 16 of all rows."""
    num_groups = num_inputs // GROUP
    block, target = matrix + index * num_groups * GROUP_BYTES, out + index * LANES * 4
    if num_rows == 1:
        _one_row(block, num_groups, x, sums, target)
    else:
        for row in range(0, num_rows, ROWS_AT_ONCE):
            _four_rows(
                block, num_groups, x + row * num_inputs * 4, sums + row * num_groups * 4,
                target + row * num_outputs * 4, num_outputs * 4,
            )  # fmt: skip


@kernel
def multiply(
    matrix: int, num_outputs: int, num_inputs: int, x: int, sums: int, out: int, num_rows: int
) -> None:
    """`out` fp32 [rows, outputs] = `x` fp32 [rows, inputs] times the matrix, with `sum_groups` of `x`.

    With more than one row, there is room in all of them for a whole number of `ROWS_AT_ONCE`.
    """
    for index in range(num_outputs // LANES):
        _block(matrix, index, num_outputs, num_inputs, x, sums, out, num_rows)


@spread_kernel
def multiply_spread(
    matrix: int, num_outputs: int, num_inputs: int, x: int, sums: int, out: int, num_rows: int
) -> None:
    """`multiply` on several threads."""
    for index in numba.prange(num_outputs // LANES):
        _block(matrix, index, num_outputs, num_inputs, x, sums, out, num_rows)
