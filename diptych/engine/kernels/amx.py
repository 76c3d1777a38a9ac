"""Matrix products on the tile registers of CPUs that have AMX: bf16 in, fp32 out.

A step multiplies 32 rows by 32 columns over 32 elements, in all eight registers:

    left 0  [16 rows, 32]    | sum 0 | sum 1      right 0, right 1: [16 pairs of elements, 16 columns, 2]
    left 1  [16 rows, 32]    | sum 2 | sum 3      sums: fp32 [16, 16]

Left operands lie in memory as rows; right ones as tiles of 1 KiB, in which pairs of elements of a column are
neighbours. Registers belong to a thread: each `configure`s them, and `release`s them when it is done.
Operations on `few` rows leave out everything below row 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types

from diptych.engine.kernels.llvm import call, operation

TILE_ROWS = 16
TILE_BYTES = 1024
STEP = 32
"""Elements that a step multiplies, and rows and columns that it has."""

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_SUMS, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
_NAMES = "llvm.x86.tile{}".format


def can_multiply() -> bool:
    """Whether this CPU has the registers, the compiler knows them, and Linux lets this process use them."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-bf16") and features.get("amx-tile")):
        return False
    # Asks Linux for the registers, for all threads. Private to torch, which is pinned.
    return bool(torch.cpu._init_amx())  # noqa: SLF001


def _register(number: int) -> Any:
    return ir.Constant(_I8, number)


def _raw(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I8.as_pointer())


def _move(builder: Any, which: str, register: int, address: Any, step: Any) -> None:
    call(builder, _NAMES(which), ir.VoidType(), (_register(register), _raw(builder, address), step))


def _emit_configure(builder: Any) -> None:
    """Palette 1, and every register 16 rows of 64 bytes: a constant of the compiled code, for an address
    that was captured would be another in each process, and what was compiled never found again."""
    settings = bytearray(64)
    settings[0] = 1
    settings[16:32] = (64).to_bytes(2, "little") * 8
    settings[48:56] = bytes([TILE_ROWS]) * 8
    kind = ir.ArrayType(_I8, len(settings))
    name = builder.module.get_unique_name("tile_settings")
    found = ir.GlobalVariable(builder.module, kind, name)
    found.linkage, found.global_constant = "internal", True
    found.initializer = ir.Constant(kind, settings)
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), (builder.bitcast(found, _I8.as_pointer()),))


def _emit_release(builder: Any) -> None:
    call(builder, _NAMES("release"), ir.VoidType(), ())


def _emit_clear(builder: Any) -> None:
    for register in _SUMS:
        call(builder, _NAMES("zero"), ir.VoidType(), (_register(register),))


def _emit_step(few: bool) -> Callable[..., None]:
    def emit(builder: Any, left: Any, left_step: Any, right: Any, next_right: Any) -> None:
        _move(builder, "loadd64", _LEFT[0], left, left_step)
        _move(builder, "loadd64", _RIGHT[0], right, _I64(64))
        _move(builder, "loadd64", _RIGHT[1], next_right, _I64(64))
        if not few:
            below = builder.add(left, builder.mul(left_step, _I64(TILE_ROWS)))
            _move(builder, "loadd64", _LEFT[1], below, left_step)
        for number in _SUMS[:2] if few else _SUMS:
            registers = (number, _LEFT[number // 2], _RIGHT[number % 2])
            call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), [_register(i) for i in registers])

    return emit


def _emit_sums(which: str, few: bool) -> Callable[..., None]:
    """`which`: "loadd64" or "stored64"."""

    def emit(builder: Any, address: Any, step: Any) -> None:
        below = builder.add(address, builder.mul(step, _I64(TILE_ROWS)))
        for number in _SUMS[:2] if few else _SUMS:
            row = below if number >= 2 else address
            _move(builder, which, number, builder.add(row, _I64(64 * (number % 2))), step)

    return emit


configure: Callable[[], None] = operation(types.void, (), _emit_configure)
"""Makes this thread's registers ready."""
release: Callable[[], None] = operation(types.void, (), _emit_release)
clear: Callable[[], None] = operation(types.void, (), _emit_clear)
"""Sums are zero."""
_Step = Callable[[int, int, int, int], None]
_Sums = Callable[[int, int], None]
step: _Step = operation(types.void, (types.int64,) * 4, _emit_step(few=False))
"""Adds a product to the sums: left rows' address, bytes between two rows; right tiles' addresses."""
step_few: _Step = operation(types.void, (types.int64,) * 4, _emit_step(few=True))
load_sums: _Sums = operation(types.void, (types.int64,) * 2, _emit_sums("loadd64", few=False))
"""The sums from fp32 [32, 32] at the address, rows so many bytes apart."""
load_few: _Sums = operation(types.void, (types.int64,) * 2, _emit_sums("loadd64", few=True))
store_sums: _Sums = operation(types.void, (types.int64,) * 2, _emit_sums("stored64", few=False))
"""The sums to memory; see `load_sums`."""
store_few: _Sums = operation(types.void, (types.int64,) * 2, _emit_sums("stored64", few=True))
