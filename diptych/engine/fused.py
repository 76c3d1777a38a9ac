"""Row operations and decode attention by fused kernels: bf16 on a CPU, where numba is installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.attention import Call
from diptych.engine.batch import Batch, Piece, block_tables
from diptych.engine.config import ModelConfig
from diptych.engine.kernels.paged_attention import paged_attention
from diptych.engine.kernels.rows import add_norm, gate, norm, rotate_and_keep
from diptych.engine.row_ops import Angles


class FusedOps:
    """`RowOps` in bf16; angles in fp32."""

    def __init__(self, config: ModelConfig, angles: Angles) -> None:
        self._config = config
        self._angles = angles
        self._rotate_and_keep = rotate_and_keep(config.num_heads, config.num_kv_heads, config.head_size)
        self._query_size = config.num_heads * config.head_size

    def normed(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `RowOps.normed`."""
        out = torch.empty_like(hidden)
        num_rows, width = hidden.shape
        addresses = (weight.data_ptr(), out.data_ptr())
        if delta is None:
            norm(hidden.data_ptr(), *addresses, num_rows, width, self._config.rms_eps)
        else:
            add_norm(hidden.data_ptr(), delta.data_ptr(), *addresses, num_rows, width, self._config.rms_eps)
        return out

    def placed(self, qkv: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """See `RowOps.placed`. The queries stay where they are, in `qkv`."""
        self._rotate_and_keep(
            qkv.data_ptr(), batch.num_rows, batch.positions.data_ptr(),
            self._angles.cos.data_ptr(), self._angles.sin.data_ptr(),
            batch.write_slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        return qkv[:, : self._query_size].view(len(qkv), -1, self._config.head_size)

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `RowOps.gated`."""
        num_rows, both = gate_up.shape
        out = gate_up.new_empty(num_rows, both // 2)
        gate(gate_up.data_ptr(), out.data_ptr(), num_rows, both // 2)
        return out


class PagedDecode:
    """A `DecodeForm` that reads the pool's blocks where they lie."""

    def __init__(self, config: ModelConfig, block_tokens: int, num_threads: int) -> None:
        self._kernel = paged_attention(
            config.num_heads, config.num_kv_heads, config.head_size, block_tokens, num_threads
        )

    def __call__(self, pieces: Sequence[Piece], device: str) -> Call:
        """See `DecodeForm`."""
        tables, ends = block_tables(pieces)
        kernel = self._kernel

        def call(queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
            kernel(
                queries.data_ptr(), queries.stride(0), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
                tables, ends,
            )  # fmt: skip

        return call
