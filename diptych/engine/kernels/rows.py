"""What lies between two matrix products, row by row and in one pass each, on bf16 rows in memory.

Arithmetic is fp32; each result is rounded to bf16 once. Widths are multiples of 16 elements.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from diptych.engine.kernels.jit import kernel, part, spread_kernel
from diptych.engine.kernels.vectors import (
    LANES,
    add,
    div,
    exp,
    fill,
    fma,
    load,
    load_bf16,
    load_int,
    mul,
    store,
    store_bf16,
    sub,
    total,
)

_BYTES = LANES * 2  # of a vector in bf16


@part
def _norm(hidden: int, weight: int, out: int, width: int, eps: float) -> None:
    squares = fill(np.float32(0))
    for at in range(0, width * 2, _BYTES):
        value = load_bf16(hidden + at)
        squares = fma(value, value, squares)
    inverse = fill(np.float32(1) / np.sqrt(total(squares) / np.float32(width) + np.float32(eps)))
    for at in range(0, width * 2, _BYTES):
        store_bf16(out + at, mul(mul(load_bf16(hidden + at), inverse), load_bf16(weight + at)))


@part
def _add_norm(hidden: int, delta: int, weight: int, out: int, width: int, eps: float) -> None:
    for at in range(0, width * 2, _BYTES):
        store_bf16(hidden + at, add(load_bf16(hidden + at), load_bf16(delta + at)))
    _norm(hidden, weight, out, width, eps)


@part
def _gate(gate_up: int, out: int, width: int) -> None:
    zero, one = np.float32(0), np.float32(1)
    for at in range(0, width * 2, _BYTES):
        value = load_bf16(gate_up + at)
        silu = div(value, add(fill(one), exp(sub(fill(zero), value))))
        store_bf16(out + at, mul(silu, load_bf16(gate_up + width * 2 + at)))


@kernel
def norm(hidden: int, weight: int, out: int, num_rows: int, width: int, eps: float) -> None:
    """Root mean square norm of `hidden` [rows, width] times `weight` [width], to `out` [rows, width]."""
    for row in range(num_rows):
        _norm(hidden + row * width * 2, weight, out + row * width * 2, width, eps)


@spread_kernel
def norm_spread(hidden: int, weight: int, out: int, num_rows: int, width: int, eps: float) -> None:
    """`norm` on several threads."""
    for row in numba.prange(num_rows):
        _norm(hidden + row * width * 2, weight, out + row * width * 2, width, eps)


@kernel
def add_norm(hidden: int, delta: int, weight: int, out: int, num_rows: int, width: int, eps: float) -> None:
    """Adds `delta` to `hidden`, both [rows, width]; then `norm`, of the rounded sum."""
    for row in range(num_rows):
        begin = row * width * 2
        _add_norm(hidden + begin, delta + begin, weight, out + begin, width, eps)


@spread_kernel
def add_norm_spread(
    hidden: int, delta: int, weight: int, out: int, num_rows: int, width: int, eps: float
) -> None:
    """`add_norm` on several threads."""
    for row in numba.prange(num_rows):
        begin = row * width * 2
        _add_norm(hidden + begin, delta + begin, weight, out + begin, width, eps)


@kernel
def gate(gate_up: int, out: int, num_rows: int, width: int) -> None:
    """silu(gate) * up: of `gate_up` [rows, 2 * width] to `out` [rows, width]."""
    for row in range(num_rows):
        _gate(gate_up + row * width * 4, out + row * width * 2, width)


@spread_kernel
def gate_spread(gate_up: int, out: int, num_rows: int, width: int) -> None:
    """`gate` on several threads."""
    for row in numba.prange(num_rows):
        _gate(gate_up + row * width * 4, out + row * width * 2, width)


@part
def _rotate(head: int, cosines: int, sines: int, half: int) -> None:
    for i in range(0, half, LANES):
        first, second = load_bf16(head + i * 2), load_bf16(head + (half + i) * 2)
        cos, sin = load(cosines + i * 4), load(sines + i * 4)
        store_bf16(head + i * 2, sub(mul(first, cos), mul(second, sin)))
        store_bf16(head + (half + i) * 2, add(mul(second, cos), mul(first, sin)))


@part
def _copy(source: int, target: int, num_bytes: int) -> None:
    for at in range(0, num_bytes, _BYTES):
        store_bf16(target + at, load_bf16(source + at))


RotateAndKeep = Callable[[int, int, int, int, int, int, int, int], None]
"""(qkv [rows, (heads + 2 * kv_heads) * head_size], rows, positions [rows], cosines and sines fp32 [context,
head_size / 2], slots [rows], keys and values [slots, kv_heads * head_size]); integers are int64."""


def rotate_and_keep(num_heads: int, num_kv_heads: int, head_size: int, num_threads: int = 1) -> RotateAndKeep:
    """Rotates the queries and keys of `qkv` in place by their positions, and copies keys and values to their
    slots. `head_size` is a multiple of 32."""

    def run(
        qkv: int, num_rows: int, positions: int, cosines: int, sines: int, slots: int, keys: int, values: int
    ) -> None:
        rotate_and_keep_rows(
            qkv, num_rows, positions, cosines, sines, slots, keys, values,
            num_heads, num_kv_heads, head_size,
        )  # fmt: skip

    def spread_run(
        qkv: int, num_rows: int, positions: int, cosines: int, sines: int, slots: int, keys: int, values: int
    ) -> None:
        for row in numba.prange(num_rows):
            rotate_and_keep_row(
                qkv, row, positions, cosines, sines, slots, keys, values, num_heads, num_kv_heads, head_size
            )

    return kernel(run) if num_threads == 1 else spread_kernel(spread_run)


@part
def rotate_and_keep_rows(
    qkv: int, num_rows: int, positions: int, cosines: int, sines: int, slots: int, keys: int, values: int,
    num_heads: int, num_kv_heads: int, head_size: int,
) -> None:  # fmt: skip
    """See `rotate_and_keep`."""
    for row in range(num_rows):
        rotate_and_keep_row(
            qkv, row, positions, cosines, sines, slots, keys, values, num_heads, num_kv_heads, head_size
        )


@part
def rotate_and_keep_row(
    qkv: int, row: int, positions: int, cosines: int, sines: int, slots: int, keys: int, values: int,
    num_heads: int, num_kv_heads: int, head_size: int,
) -> None:  # fmt: skip
    """One row of them."""
    head_bytes, slot_bytes = head_size * 2, num_kv_heads * head_size * 2
    source = qkv + row * (num_heads * head_bytes + 2 * slot_bytes)
    angles = load_int(positions + row * 8) * head_size * 2
    new_keys = source + num_heads * head_bytes
    for head in range(source, new_keys + slot_bytes, head_bytes):
        _rotate(head, cosines + angles, sines + angles, head_size // 2)
    slot = load_int(slots + row * 8) * slot_bytes
    _copy(new_keys, keys + slot, slot_bytes)
    _copy(new_keys + slot_bytes, values + slot, slot_bytes)


@kernel
def add_to_rows(rows: int, what: int, num_rows: int, width: int) -> None:
    """Adds `what` [width] to each of `rows` [rows, width], in place."""
    for row in range(num_rows):
        for at in range(0, width * 2, _BYTES):
            where = rows + row * width * 2 + at
            store_bf16(where, add(load_bf16(where), load_bf16(what + at)))


@kernel
def widen(source: int, target: int, count: int) -> None:
    """bf16 to fp32; `count` is a multiple of 16."""
    for at in range(0, count * 2, _BYTES):
        store(target + at * 2, load_bf16(source + at))


@kernel
def narrow(source: int, target: int, count: int) -> None:
    """fp32 to bf16; `count` is a multiple of 16."""
    for at in range(0, count * 2, _BYTES):
        store_bf16(target + at, load(source + at * 2))
