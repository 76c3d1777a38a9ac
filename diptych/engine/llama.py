"""The Llama family's forward pass, on a flat batch of tokens over a paged pool.

**Exactness by tiles.** With `row_tile` rows a tile, everything between two attentions runs on tensors of
exactly that many rows, so that each operation has one shape for good and a row's result cannot depend on
how many others came along. Without it the whole batch is one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from diptych.engine.attention import Attend
from diptych.engine.batch import Batch
from diptych.engine.config import ModelConfig
from diptych.engine.linear import Linear, LinearForm
from diptych.engine.pool import GroupPool
from diptych.engine.rope import rope_tables
from diptych.engine.row_ops import Angles, RowOpsForm, TorchOps
from diptych.engine.weight_source import WeightSource
from diptych.engine.weights import EMBED, HEAD, NORM, layer_weights

Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Form:
    """In what form a model computes. `row_tile` None: all rows at once; `angle_dtype` None: `dtype`."""

    dtype: torch.dtype
    device: str
    linear: LinearForm
    row_ops: RowOpsForm = TorchOps
    angle_dtype: torch.dtype | None = None
    row_tile: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: Tensor  # [hidden]
    qkv: Linear
    out: Linear
    ff_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear


class Llama:
    """Weights ready to run. `max_context` positions have rotary angles."""

    def __init__(self, config: ModelConfig, source: WeightSource, form: Form, max_context: int) -> None:
        self.config = config
        self.form = form
        self.max_context = max_context
        self.embed = self._loaded(source, EMBED)  # [vocab, hidden]
        head = self.embed if config.tied_embeddings else self._loaded(source, HEAD)
        self._head = form.linear(head, None)
        self.norm = self._loaded(source, NORM)
        self._layers = [self._layer(source, index) for index in range(config.num_layers)]
        tables = rope_tables(config.rope, config.head_size, max_context)
        cos, sin = (table.to(form.device, form.angle_dtype or form.dtype).contiguous() for table in tables)
        self.angles = Angles(cos, sin)
        self._ops = form.row_ops(config, self.angles)

    def embedded(self, batch: Batch) -> Tensor:
        """The batch's tokens as [rows, hidden]."""
        return functional.embedding(batch.tokens, self.embed)

    def forward(self, batch: Batch, pool: GroupPool, attend: Attend, stop: Stop | None) -> Tensor | None:
        """Writes the batch's KV and returns the sampled rows' logits, fp32 [len(sampled_rows), vocab].

        `stop` is polled before each layer; None once it is true. The KV of this batch is undefined then.
        """
        hidden = self.embedded(batch)
        delta: Tensor | None = None
        for layer, keys, values in zip(self._layers, pool.keys, pool.values, strict=True):
            if stop is not None and stop():
                return None
            qkv = self._by_tiles(self._project, layer, hidden, delta)
            queries = self._ops.placed(qkv, batch, keys, values)
            delta = self._by_tiles(self._finish, layer, hidden, attend(queries, keys, values))
        rows = batch.sampled_rows
        return self.logits(hidden[rows], delta[rows] if delta is not None else None)

    def _project(self, layer: _Layer, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """Adds the last layer's `delta` to `hidden` in place, and gives [rows, heads and KV heads]."""
        return layer.qkv(self._ops.normed(hidden, delta, layer.input_norm))

    def _finish(self, layer: _Layer, hidden: Tensor, mixed: Tensor | None) -> Tensor:
        """Adds the output projection to `hidden` in place, and gives what the feed-forward adds to it."""
        out = None if mixed is None else layer.out(mixed)
        return layer.down(self._ops.gated(layer.gate_up(self._ops.normed(hidden, out, layer.ff_norm))))

    def logits(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """Of rows after the last layer, which adds `delta` to them: fp32 [rows, vocab]."""
        num_rows = len(hidden)
        tile = self.form.row_tile or max(num_rows, 1)
        if delta is not None:
            hidden = hidden + delta
        padded = functional.pad(hidden, (0, 0, 0, -num_rows % tile))
        parts = [self._head(self._ops.normed(part, None, self.norm)) for part in torch.split(padded, tile)]
        return torch.cat(parts)[:num_rows].float()

    def _by_tiles(
        self,
        part: Callable[[_Layer, Tensor, Tensor | None], Tensor],
        layer: _Layer,
        hidden: Tensor,
        other: Tensor | None,
    ) -> Tensor:
        """`part` of the layer, on `row_tile` rows at a time."""
        tile = self.form.row_tile
        if tile is None or tile == len(hidden):
            return part(layer, hidden, other)
        tiles = torch.split(hidden, tile)
        others = torch.split(other, tile) if other is not None else [None] * len(tiles)
        return torch.cat([part(layer, *rows) for rows in zip(tiles, others, strict=True)])

    def _layer(self, source: WeightSource, index: int) -> _Layer:
        form = self.form
        weights = layer_weights(source, self.config, index, form.dtype, form.device)
        return _Layer(
            input_norm=weights.input_norm,
            qkv=form.linear(weights.qkv, weights.qkv_bias),
            out=form.linear(weights.out, None),
            ff_norm=weights.ff_norm,
            gate_up=form.linear(weights.gate_up, None),
            down=form.linear(weights.down, None),
        )

    def _loaded(self, source: WeightSource, name: str) -> Tensor:
        # A copy, because a file's tensor is a view of the mapped file.
        return source.tensor(name).to(self.form.device, self.form.dtype, copy=True)
