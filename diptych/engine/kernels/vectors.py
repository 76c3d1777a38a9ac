"""Vectors of 16 fp32 lanes as values inside numba kernels, with bf16 and fp32 memory at their ends.

numba leaves vectorising to LLVM, which for attention picks scatters and strides. These operations say what
is meant: each emits LLVM's own vector instructions, which become AVX-512 registers, pairs of AVX2 registers
or quadruples of NEON ones. Addresses are integers; nothing has to be aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from diptych.engine.kernels.llvm import call, operation, pointer

LANES = 16


class Floats:
    """16 fp32 lanes. For type checkers: such values exist in compiled code only."""


class _FloatsType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Floats")


_FLOATS = _FloatsType()
_F32 = ir.FloatType()
_I64, _I32, _I16, _I8 = (ir.IntType(bits) for bits in (64, 32, 16, 8))
_VECTOR, _BITS, _HALVES, _BYTES = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16, _I8))


@register_model(_FloatsType)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)  # type: ignore[no-untyped-call]


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _emit_load_bf16(builder: Any, address: Any) -> Any:
    halves = builder.load(pointer(builder, address, _HALVES), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, _BITS), _all(_BITS, 16)), _VECTOR)


def _emit_store_bf16(builder: Any, address: Any, value: Any) -> None:
    bits = builder.bitcast(value, _BITS)
    # To the nearest, ties to even: as torch rounds. A NaN may become an infinity.
    odd = builder.and_(builder.lshr(bits, _all(_BITS, 16)), _all(_BITS, 1))
    rounded = builder.add(builder.add(bits, _all(_BITS, 0x7FFF)), odd)
    halves = builder.trunc(builder.lshr(rounded, _all(_BITS, 16)), _HALVES)
    builder.store(halves, pointer(builder, address, _HALVES), align=2)


def _emit_load_nibbles(builder: Any, address: Any, shift: Any) -> Any:
    packed = builder.zext(builder.load(pointer(builder, address, _BYTES), align=1), _BITS)
    amount = _splat(builder, builder.trunc(shift, _I32), _BITS)
    return builder.uitofp(builder.and_(builder.lshr(packed, amount), _all(_BITS, 15)), _VECTOR)


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _all(_BITS, 0))


def _emit_store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer(builder, address, value.type), align=4)


def _emit_total(builder: Any, value: Any) -> Any:
    arguments = (ir.Constant(_F32, -0.0), value)
    return call(builder, "llvm.vector.reduce.fadd.v16f32", _F32, arguments, fastmath=("reassoc",))


def _emit_higher(builder: Any, a: Any, b: Any) -> Any:
    # Not llvm.maxnum, whose rule for NaN takes three instructions instead of one.
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _emit_highest(builder: Any, value: Any) -> Any:
    for distance in (8, 4, 2, 1):
        lanes = ir.Constant(_BITS, [lane ^ distance for lane in range(LANES)])
        value = _emit_higher(builder, value, builder.shuffle_vector(value, value, lanes))
    return builder.extract_element(value, ir.Constant(_I32, 0))


def _emit_prefetch(builder: Any, address: Any) -> None:
    # For reading, into the second level, data.
    options = (ir.Constant(_I32, value) for value in (0, 2, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), (pointer(builder, address, _I16), *options))


def _emit_exp(builder: Any, value: Any) -> Any:
    """2 ** whole as bits of an exponent, times a polynomial for 2 ** part."""
    power = builder.fmul(value, _all(_VECTOR, float(np.float32(np.log2(np.e)))))
    bounded = call(builder, "llvm.minnum.v16f32", _VECTOR, (power, _all(_VECTOR, 127.0)))
    bounded = call(builder, "llvm.maxnum.v16f32", _VECTOR, (bounded, _all(_VECTOR, -126.0)))
    whole = call(builder, "llvm.floor.v16f32", _VECTOR, (bounded,))
    part = builder.fsub(bounded, whole)
    found = _all(_VECTOR, _EXP2[0])
    for coefficient in _EXP2[1:]:
        found = call(builder, "llvm.fma.v16f32", _VECTOR, (found, part, _all(_VECTOR, coefficient)))
    exponent = builder.add(builder.fptosi(whole, _BITS), _all(_BITS, 127))
    scaled = builder.fmul(builder.bitcast(builder.shl(exponent, _all(_BITS, 23)), _VECTOR), found)
    is_nothing = builder.fcmp_ordered("<", power, _all(_VECTOR, -126.0))
    return builder.select(is_nothing, _all(_VECTOR, 0.0), scaled)


def _emit_exp_roughly(builder: Any, value: Any) -> Any:
    """As `_emit_exp`, with a shorter polynomial, and the exponent added to its bits."""
    power = builder.fmul(value, _all(_VECTOR, float(np.float32(np.log2(np.e)))))
    bounded = _emit_higher(builder, power, _all(_VECTOR, -126.0))
    whole = call(builder, "llvm.floor.v16f32", _VECTOR, (bounded,))
    part = builder.fsub(bounded, whole)
    found = _all(_VECTOR, _ROUGH_EXP2[0])
    for coefficient in _ROUGH_EXP2[1:]:
        found = call(builder, "llvm.fma.v16f32", _VECTOR, (found, part, _all(_VECTOR, coefficient)))
    exponent = builder.shl(builder.fptosi(whole, _BITS), _all(_BITS, 23))
    return builder.bitcast(builder.add(builder.bitcast(found, _BITS), exponent), _VECTOR)


def _emit_keep_first(builder: Any, value: Any, count: Any) -> Any:
    lanes = ir.Constant(_BITS, list(range(LANES)))
    is_kept = builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32), _BITS))
    return builder.select(is_kept, value, _all(_VECTOR, -np.inf))


def _emit_pair(builder: Any, first: Any, second: Any, target: Any) -> None:
    low, high = (
        builder.zext(builder.load(pointer(builder, address, _HALVES), align=2), _BITS)
        for address in (first, second)
    )
    words = builder.or_(low, builder.shl(high, _all(_BITS, 16)))
    builder.store(words, pointer(builder, target, _BITS), align=4)


def _emit_lone(builder: Any, first: Any, target: Any) -> None:
    words = builder.zext(builder.load(pointer(builder, first, _HALVES), align=2), _BITS)
    builder.store(words, pointer(builder, target, _BITS), align=4)


def _emit_transpose_pairs(builder: Any, source: Any, step: Any, target: Any) -> None:
    """Four rounds; in each, rows a distance apart exchange the halves of every pair of such lanes."""
    rows = []
    for _ in range(LANES):
        rows.append(builder.load(pointer(builder, source, _BITS), align=4))
        source = builder.add(source, step)
    for distance in (8, 4, 2, 1):
        upper = [i for i in range(LANES) if not i & distance]
        keep = [i if not i & distance else LANES + i - distance for i in range(LANES)]
        take = [i + distance if not i & distance else LANES + i for i in range(LANES)]
        for i in upper:
            pair = rows[i], rows[i + distance]
            rows[i] = builder.shuffle_vector(*pair, ir.Constant(_BITS, keep))
            rows[i + distance] = builder.shuffle_vector(*pair, ir.Constant(_BITS, take))
    for row in rows:
        builder.store(row, pointer(builder, target, _BITS), align=4)
        target = builder.add(target, target.type(64))


def _emit_totals(builder: Any, address: Any) -> Any:
    """16 vectors to their 16 totals, by adding neighbours pairwise: 15 additions, not 16 times 4."""
    parts = [
        builder.load(pointer(builder, builder.add(address, address.type(64 * i)), _VECTOR), align=4)
        for i in range(LANES)
    ]
    while len(parts) > 1:
        parts = [_neighbours_added(builder, a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _neighbours_added(builder: Any, a: Any, b: Any) -> Any:
    """a0 + a1, a2 + a3, ... b0 + b1, ..."""
    picks = (
        builder.shuffle_vector(a, b, ir.Constant(_BITS, list(range(first, 2 * LANES, 2)))) for first in (0, 1)
    )
    return builder.fadd(*picks)


_EXP2 = [float(np.float32(c)) for c in
         (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1)]  # fmt: skip

_ROUGH_EXP2 = [float(np.float32(c)) for c in (0.077822868, 0.22586994, 0.6961709, 0.9998639)]

load_bf16: Callable[[int], Floats] = operation(_FLOATS, (types.int64,), _emit_load_bf16)
"""16 bf16 values as fp32."""
store_bf16: Callable[[int, Floats], None] = operation(types.void, (types.int64, _FLOATS), _emit_store_bf16)
"""Rounded to 16 bf16 values."""
load: Callable[[int], Floats] = operation(
    _FLOATS, (types.int64,), lambda builder, a: builder.load(pointer(builder, a, _VECTOR), align=4)
)
store: Callable[[int, Floats], None] = operation(types.void, (types.int64, _FLOATS), _emit_store)
store_one: Callable[[int, np.float32], None] = operation(
    types.void, (types.int64, types.float32), _emit_store
)
load_one: Callable[[int], np.float32] = operation(
    types.float32, (types.int64,), lambda builder, a: builder.load(pointer(builder, a, _F32))
)
load_nibbles: Callable[[int, int], Floats] = operation(
    _FLOATS, (types.int64, types.int64), _emit_load_nibbles
)
"""16 numbers from 0 to 15: bits `shift` to `shift + 4` of each of 16 bytes."""
load_int: Callable[[int], int] = operation(
    types.int64, (types.int64,), lambda builder, a: builder.load(pointer(builder, a, _I64))
)
fill: Callable[[np.float32], Floats] = operation(
    _FLOATS, (types.float32,), lambda builder, a: _splat(builder, a, _VECTOR)
)
"""The scalar in every lane."""
add: Callable[[Floats, Floats], Floats] = operation(
    _FLOATS, (_FLOATS, _FLOATS), lambda builder, a, b: builder.fadd(a, b)
)
sub: Callable[[Floats, Floats], Floats] = operation(
    _FLOATS, (_FLOATS, _FLOATS), lambda builder, a, b: builder.fsub(a, b)
)
mul: Callable[[Floats, Floats], Floats] = operation(
    _FLOATS, (_FLOATS, _FLOATS), lambda builder, a, b: builder.fmul(a, b)
)
div: Callable[[Floats, Floats], Floats] = operation(
    _FLOATS, (_FLOATS, _FLOATS), lambda builder, a, b: builder.fdiv(a, b)
)
fma: Callable[[Floats, Floats, Floats], Floats] = operation(
    _FLOATS, (_FLOATS,) * 3, lambda builder, *abc: call(builder, "llvm.fma.v16f32", _VECTOR, abc)
)
"""a * b + c, rounded once."""
exp: Callable[[Floats], Floats] = operation(_FLOATS, (_FLOATS,), _emit_exp)
"""e ** x, to 3e-7 of its value; 0 below 2 ** -126, no more than 2 ** 128."""
total: Callable[[Floats], np.float32] = operation(types.float32, (_FLOATS,), _emit_total)
"""The sum of the lanes."""
totals: Callable[[int], Floats] = operation(_FLOATS, (types.int64,), _emit_totals)
"""Lane i: the sum of the lanes of vector i of the 16 fp32 vectors at the address."""
higher: Callable[[Floats, Floats], Floats] = operation(_FLOATS, (_FLOATS, _FLOATS), _emit_higher)
"""Lane by lane, the higher."""
keep_first: Callable[[Floats, int], Floats] = operation(_FLOATS, (_FLOATS, types.int64), _emit_keep_first)
"""Minus infinity in all lanes but the first so many."""
exp_roughly: Callable[[Floats], Floats] = operation(_FLOATS, (_FLOATS,), _emit_exp_roughly)
"""e ** x for x <= 0, to 2e-4 of its value and a smallest of 2 ** -126: for what becomes bf16."""
pair_bf16: Callable[[int, int, int], None] = operation(types.void, (types.int64,) * 3, _emit_pair)
"""Interleaves 16 bf16 values at the first address with 16 at the second, to the third."""
lone_bf16: Callable[[int, int], None] = operation(types.void, (types.int64,) * 2, _emit_lone)
"""As `pair_bf16` with zeros."""
transpose_pairs: Callable[[int, int, int], None] = operation(
    types.void, (types.int64,) * 3, _emit_transpose_pairs
)
"""16 rows of 16 pairs of bf16, at the first address and so many bytes apart, transposed to the third."""
highest: Callable[[Floats], np.float32] = operation(types.float32, (_FLOATS,), _emit_highest)
"""The highest lane."""
prefetch: Callable[[int], None] = operation(types.void, (types.int64,), _emit_prefetch)
"""Asks for the cache line of an address, whether it exists or not."""
