"""Operations for numba kernels that are given as LLVM's own instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic


def operation(result: Any, parameters: Sequence[Any], emit: Callable[..., Any]) -> Any:
    """A function for kernels: `emit` gets LLVM's builder and arguments, and returns a value or None."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = emit(builder, *arguments)
        return context.get_dummy_value() if value is None else value

    signature = result(*parameters)
    # numba asks each for its parameters: they can't be one function of many.
    arities: tuple[Callable[..., Any], ...] = (
        lambda context: (signature, generate),
        lambda context, a: (signature, generate),
        lambda context, a, b: (signature, generate),
        lambda context, a, b, c: (signature, generate),
        lambda context, a, b, c, d: (signature, generate),
        lambda context, a, b, c, d, e: (signature, generate),
    )
    return intrinsic(arities[len(parameters)])


def call(builder: Any, name: str, kind: Any, arguments: Sequence[Any], **options: Any) -> Any:
    """Calls one of LLVM's intrinsic functions."""
    signature = ir.FunctionType(kind, [argument.type for argument in arguments])
    found = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(found, arguments, **options)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An integer address as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())
