"""A linear layer in the form that its phase, device and dtype run best. All give `x @ weight.T + bias`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor], Tensor]
"""[rows, in] -> [rows, out]"""

LinearForm = Callable[[Tensor, Tensor | None], Linear]
"""Takes a weight [out, in] and a bias [out] or None; may keep the weight in a layout of its own."""


def plain(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """torch's own linear on the weight as it is."""
    return lambda x: functional.linear(x, weight, bias)


def packed(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The weight reordered once for oneDNN (CPUs), by operators that are private to torch."""
    # torch is pinned, and `can_pack` tries them before they are relied upon.
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001
    run = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    return lambda x: run(x, reordered, bias, "none", [], "")


def can_pack(device: str, dtype: torch.dtype) -> bool:
    """Whether `packed` works here: it needs oneDNN, on a CPU that it has kernels for."""
    if device != "cpu":
        return False
    try:
        layer = packed(torch.eye(32, dtype=dtype))
        return torch.equal(layer(torch.ones(2, 32, dtype=dtype)), torch.ones(2, 32, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
