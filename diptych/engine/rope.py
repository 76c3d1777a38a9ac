"""Rotary position embeddings (Su et al., "RoFormer", 2021), plain and with linear or Llama 3 scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diptych.engine.config import Rope


def rope_tables(rope: Rope, head_size: int, max_context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, fp32 [max_context, head_size / 2] each."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    angles = torch.arange(max_context).float()[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_size / 2) of each head.

    `heads` [rows, heads, head_size]; `cos`, `sin` [rows, 1, head_size / 2] in the same dtype.
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (as in Llama 3.1)."""
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    is_between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(is_between, between, scaled)
