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
from diptych.engine.rope import rope_tables, rotate
from diptych.engine.weight_source import WeightSource
from diptych.engine.weights import EMBED, HEAD, NORM, layer_weights

Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Form:
    """In what form a model computes. `row_tile` None: all rows at once."""

    dtype: torch.dtype
    device: str
    linear: LinearForm
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
        self._embed = self._loaded(source, EMBED)  # [vocab, hidden]
        head = self._embed if config.tied_embeddings else self._loaded(source, HEAD)
        self._head = form.linear(head, None)
        self._norm = self._loaded(source, NORM)
        self._layers = [self._layer(source, index) for index in range(config.num_layers)]
        tables = rope_tables(config.rope, config.head_size, max_context)
        self._cos, self._sin = (table.to(form.device, form.dtype) for table in tables)

    def forward(self, batch: Batch, pool: GroupPool, attend: Attend, stop: Stop | None) -> Tensor | None:
        """Writes the batch's KV and returns the sampled rows' logits, fp32 [len(sampled_rows), vocab].

        `stop` is polled before each layer; None once it is true. The KV of this batch is undefined then.
        """
        hidden = functional.embedding(batch.tokens, self._embed)
        cos, sin = (table[batch.positions][:, None] for table in (self._cos, self._sin))
        for layer, keys, values in zip(self._layers, pool.keys, pool.values, strict=True):
            if stop is not None and stop():
                return None
            queries, new_keys, new_values = self._by_tiles(self._project, layer, hidden, cos, sin)
            keys.index_copy_(0, batch.write_slots, new_keys[: batch.num_rows])
            values.index_copy_(0, batch.write_slots, new_values[: batch.num_rows])
            (hidden,) = self._by_tiles(self._finish, layer, hidden, attend(queries, keys, values))
        return self._logits(hidden[batch.sampled_rows])

    def _project(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Rotated queries and keys, and values: [rows, heads or kv_heads, head_size] each."""
        config = self.config
        heads = layer.qkv(self._normed(hidden, layer.input_norm)).view(len(hidden), -1, config.head_size)
        rotated = rotate(heads[:, : config.num_heads + config.num_kv_heads], cos, sin)
        return (
            rotated[:, : config.num_heads],
            rotated[:, config.num_heads :],
            heads[:, config.num_heads + config.num_kv_heads :],
        )

    def _finish(self, layer: _Layer, hidden: Tensor, mixed: Tensor) -> tuple[Tensor]:
        """Output projection and feed-forward, each added to `hidden` [rows, hidden]."""
        hidden = hidden + layer.out(mixed)
        gate, up = layer.gate_up(self._normed(hidden, layer.ff_norm)).chunk(2, dim=-1)
        return (hidden + layer.down(functional.silu(gate) * up),)

    def _logits(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        tile = self.form.row_tile or max(num_rows, 1)
        padded = functional.pad(hidden, (0, 0, 0, -num_rows % tile))
        parts = [self._head(self._normed(part, self._norm)) for part in torch.split(padded, tile)]
        return torch.cat(parts)[:num_rows].float()

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.config.rms_eps)

    def _by_tiles(
        self, part: Callable[..., tuple[Tensor, ...]], layer: _Layer, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        """`part` of the layer, on `row_tile` rows at a time."""
        tile = self.form.row_tile
        if tile is None or tile == len(rows[0]):
            return part(layer, *rows)
        tiles = zip(*(torch.split(tensor, tile) for tensor in rows), strict=True)
        return tuple(torch.cat(parts) for parts in zip(*(part(layer, *t) for t in tiles), strict=True))

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
