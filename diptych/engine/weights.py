"""The tensors of a Llama-family model: their names and shapes, and layers with fused projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.config import ModelConfig
from diptych.engine.model_shapes import EMBED, HEAD, NORM, shapes_of
from diptych.engine.weight_source import WeightSource

__all__ = [
    "EMBED", "HEAD", "NORM", "LayerWeights", "layer_weights", "matrix_shapes", "num_parameters", "shapes_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Matrices are [out, in]; Q, K and V, and gate and up, are one matrix each."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_size, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_size]
    out: Tensor  # [hidden, heads * head_size]
    ff_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * ff, hidden]
    down: Tensor  # [hidden, ff]


def matrix_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of every matrix of the layers, fused ones as one."""
    hidden, ff = config.hidden_size, config.ff_size
    layer = [(sum(config.qkv_sizes), hidden), (hidden, config.qkv_sizes[0]), (2 * ff, hidden), (hidden, ff)]
    return layer * config.num_layers


def num_parameters(config: ModelConfig) -> int:
    """Elements over all tensors."""
    return sum(torch.Size(shape).numel() for shape in shapes_of(config).values())


def layer_weights(
    source: WeightSource, config: ModelConfig, layer: int, dtype: torch.dtype, device: str
) -> LayerWeights:
    """Layer number `layer`, fused, in `dtype` on `device`."""
    prefix = f"model.layers.{layer}."

    def fused(names: tuple[str, ...], kind: str) -> Tensor:
        parts = [source.tensor(f"{prefix}{name}.{kind}").to(dtype) for name in names]
        return torch.cat(parts).to(device)

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return LayerWeights(
        input_norm=fused(("input_layernorm",), "weight"),
        qkv=fused(qkv, "weight"),
        qkv_bias=fused(qkv, "bias") if config.qkv_bias else None,
        out=fused(("self_attn.o_proj",), "weight"),
        ff_norm=fused(("post_attention_layernorm",), "weight"),
        gate_up=fused(("mlp.gate_proj", "mlp.up_proj"), "weight"),
        down=fused(("mlp.down_proj",), "weight"),
    )
