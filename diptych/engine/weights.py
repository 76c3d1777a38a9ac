"""The tensors of a Llama-family model: their names and shapes, and layers with fused projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.config import ModelConfig
from diptych.engine.weight_source import WeightSource

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"


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


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config must hold."""
    hidden, ff = config.hidden_size, config.ff_size
    q_size, kv_size, _ = config.qkv_sizes
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[prefix + "mlp.gate_proj.weight"] = (ff, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (ff, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, ff)
    return shapes


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
