"""Decode steps of few rows on 4-bit layers, beside the model's own: bf16 reads three times as much.

Embeddings and head stay as they are: in 4 bits they cost perplexity, layers hardly any.

What such a step writes to the pool differs from what prefill would have written, by more than rounding. It
may be read by the request that it belongs to and stay in its worker's cache; it is nothing to be offered to
others under a hash that promises a prefill's numerics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diptych.engine.batch import Batch, block_tables
from diptych.engine.config import ModelConfig
from diptych.engine.int4 import Int4Matrix, can_shrink, int4_bytes, shrink
from diptych.engine.kernels.decode_step import DecodeStep, StepShape, decode_step
from diptych.engine.llama import Llama
from diptych.engine.pool import GroupPool
from diptych.engine.weight_source import WeightSource
from diptych.engine.weights import layer_weights, matrix_shapes


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: Tensor  # [hidden]
    qkv: Int4Matrix
    qkv_bias: Tensor | None
    out: Int4Matrix
    ff_norm: Tensor  # [hidden]
    gate_up: Int4Matrix
    down: Int4Matrix

    def addresses(self, keys: Tensor, values: Tensor) -> list[int]:
        """A row of a `LayerTable`."""
        bias = 0 if self.qkv_bias is None else self.qkv_bias.data_ptr()
        ends = (self.ff_norm.data_ptr(), self.gate_up.address, self.down.address)
        begins = (self.input_norm.data_ptr(), self.qkv.address, bias, self.out.address)
        return [*begins, *ends, keys.data_ptr(), values.data_ptr()]


def can_shrink_model(config: ModelConfig) -> bool:
    """Whether each of its matrices `can_shrink`."""
    return all(can_shrink(*shape) for shape in matrix_shapes(config))


def num_bytes(config: ModelConfig) -> int:
    """Of all 4-bit weights of a model that `can_shrink_model`."""
    return sum(int4_bytes(*shape) for shape in matrix_shapes(config))


class FewRows:
    """A second copy of a model's weights, and the step that reads it, for at most `limit` rows."""

    def __init__(
        self, model: Llama, source: WeightSource, pool: GroupPool, num_threads: int, limit: int
    ) -> None:
        config = model.config
        self._model = model
        self._limit = limit
        self._layers = [self._shrunk(source, index) for index in range(config.num_layers)]
        rows = zip(self._layers, pool.keys, pool.values, strict=True)
        self._table = np.array([layer.addresses(keys, values) for layer, keys, values in rows], np.int64)
        self._step: DecodeStep = decode_step(
            StepShape(
                config.hidden_size, config.ff_size, config.num_heads, config.num_kv_heads, config.head_size,
                pool.block_tokens, num_threads,
            )
        )  # fmt: skip

    def serves(self, batch: Batch) -> bool:
        """Whether all of the batch are single tokens, and few enough."""
        return batch.num_rows <= self._limit and len(batch.pieces) == batch.num_rows

    def logits(self, batch: Batch) -> Tensor:
        """See `Llama.forward`; there is no stopping between layers."""
        model = self._model
        hidden = model.embedded(batch)
        delta = torch.empty_like(hidden)
        tables, ends = block_tables(batch.pieces)
        self._step(
            self._table, hidden.data_ptr(), delta.data_ptr(), batch.positions.data_ptr(),
            model.angles.cos.data_ptr(), model.angles.sin.data_ptr(), batch.write_slots.data_ptr(),
            tables, ends, model.config.rms_eps,
        )  # fmt: skip
        return model.logits(hidden[batch.sampled_rows], delta[batch.sampled_rows])

    def _shrunk(self, source: WeightSource, index: int) -> _Layer:
        weights = layer_weights(source, self._model.config, index, torch.bfloat16, "cpu")
        return _Layer(
            weights.input_norm,
            shrink(weights.qkv),
            weights.qkv_bias,
            shrink(weights.out),
            weights.ff_norm,
            shrink(weights.gate_up),
            shrink(weights.down),
        )
