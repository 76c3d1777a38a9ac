"""What lies between a model's matrix products: the seam, and its plain form in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from diptych.engine.batch import Batch
from diptych.engine.config import ModelConfig
from diptych.engine.rope import rotate


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Of every position [max_context, head_size / 2], in the dtype that the form asks for."""

    cos: Tensor
    sin: Tensor


class RowOps(Protocol):
    """Operations on a batch's rows. Tensors come contiguous, as matrix products leave them."""

    def normed(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Adds `delta` to `hidden` in place, both [rows, hidden], and returns the root mean square norm."""

    def placed(self, qkv: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """Rotates queries and keys of `qkv` [rows, (heads + 2 * kv_heads) * head_size] by their positions,
        writes keys and values to their slots, and returns the queries [rows, heads, head_size]."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: of [rows, 2 * ff] to [rows, ff]."""


RowOpsForm = Callable[[ModelConfig, Angles], RowOps]


class TorchOps:
    """Any device and dtype; angles in the model's dtype."""

    def __init__(self, config: ModelConfig, angles: Angles) -> None:
        self._config = config
        self._angles = angles

    def normed(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `RowOps.normed`."""
        if delta is not None:
            hidden += delta
        return functional.rms_norm(hidden, weight.shape, weight, self._config.rms_eps)

    def placed(self, qkv: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """See `RowOps.placed`."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        cos, sin = (table[batch.positions][:, None] for table in (self._angles.cos, self._angles.sin))
        heads = qkv.view(len(qkv), -1, config.head_size)
        rotated = rotate(heads[:, :num_rotated], cos, sin)
        keys.index_copy_(0, batch.write_slots, rotated[: batch.num_rows, config.num_heads :])
        values.index_copy_(0, batch.write_slots, heads[: batch.num_rows, num_rotated:])
        return rotated[:, : config.num_heads]

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `RowOps.gated`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
