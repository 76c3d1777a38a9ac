"""Row operations and decode attention by fused kernels: bf16 on a CPU, where numba is installed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diptych.engine.attention import Attention, Call, mixed, sdpa_prefill
from diptych.engine.batch import Batch, Piece, block_tables
from diptych.engine.config import ModelConfig
from diptych.engine.kernels.amx import can_multiply
from diptych.engine.kernels.paged_attention import PagedAttention, paged_attention
from diptych.engine.kernels.rows import (
    add_norm,
    add_norm_spread,
    gate,
    gate_spread,
    norm,
    norm_spread,
    rotate_and_keep,
)
from diptych.engine.kernels.tile_parts import can_tile
from diptych.engine.kernels.tiled_decode import tiled_decode
from diptych.engine.kernels.tiled_prefill import TiledPrefill as TiledPrefillKernel
from diptych.engine.kernels.tiled_prefill import tiled_prefill
from diptych.engine.row_ops import Angles

_MANY_ROWS = 32
"""A step's rows from which on they are spread over threads: to wake them takes as long as a few rows."""


class FusedOps:
    """`RowOps` in bf16; angles in fp32."""

    def __init__(self, config: ModelConfig, angles: Angles) -> None:
        self._config = config
        self._angles = angles
        shape = (config.num_heads, config.num_kv_heads, config.head_size)
        self._rotate_and_keep = rotate_and_keep(*shape)
        self._rotate_and_keep_spread = rotate_and_keep(*shape, num_threads=2)
        self._query_size = config.num_heads * config.head_size

    def normed(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `RowOps.normed`."""
        out = torch.empty_like(hidden)
        num_rows, width = hidden.shape
        addresses = (weight.data_ptr(), out.data_ptr())
        spread = _spread(num_rows)
        if delta is None:
            run = norm_spread if spread else norm
            run(hidden.data_ptr(), *addresses, num_rows, width, self._config.rms_eps)
        else:
            added = add_norm_spread if spread else add_norm
            added(hidden.data_ptr(), delta.data_ptr(), *addresses, num_rows, width, self._config.rms_eps)
        return out

    def placed(self, qkv: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """See `RowOps.placed`. The queries stay where they are, in `qkv`."""
        run = self._rotate_and_keep_spread if _spread(batch.num_rows) else self._rotate_and_keep
        run(
            qkv.data_ptr(), batch.num_rows, batch.positions.data_ptr(),
            self._angles.cos.data_ptr(), self._angles.sin.data_ptr(),
            batch.write_slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        return qkv[:, : self._query_size].view(len(qkv), -1, self._config.head_size)

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `RowOps.gated`."""
        num_rows, both = gate_up.shape
        out = gate_up.new_empty(num_rows, both // 2)
        run = gate_spread if _spread(num_rows) else gate
        run(gate_up.data_ptr(), out.data_ptr(), num_rows, both // 2)
        return out


def _spread(num_rows: int) -> bool:
    """Whether rows are worth more than one thread."""
    return num_rows >= _MANY_ROWS and torch.get_num_threads() > 1


class PagedDecode:
    """A `DecodeForm` that reads the pool's blocks where they lie."""

    def __init__(self, kernel: PagedAttention) -> None:
        self._kernel = kernel

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


class TiledPrefill:
    """A `PrefillForm` that reads the pool's blocks where they lie."""

    def __init__(self, kernel: TiledPrefillKernel) -> None:
        self._kernel = kernel

    def __call__(self, piece: Piece, device: str) -> Call:
        """See `PrefillForm`."""
        table = np.array(piece.table[: piece.num_blocks], np.int64)

        def call(queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
            rows, target = queries[piece.row :], out[piece.row :]
            self._kernel(
                rows.data_ptr(), queries.stride(0), keys.data_ptr(), values.data_ptr(), target.data_ptr(),
                piece.num_rows, piece.start, table,
            )  # fmt: skip

        return call


def fused_attention(config: ModelConfig, block_tokens: int, num_threads: int) -> Attention:
    """The fastest kernels for this CPU, model and pool: on AMX where there is any, else on vectors, with
    torch's own attention for prompts."""
    shape = (config.num_heads, config.num_kv_heads, config.head_size, block_tokens, num_threads)
    is_tiled = can_tile(config.head_size, block_tokens) and can_multiply()
    prefill = TiledPrefill(tiled_prefill(*shape)) if is_tiled else sdpa_prefill
    return mixed(PagedDecode((tiled_decode if is_tiled else paged_attention)(*shape)), prefill)
