"""Where a model's tensors come from: the seam, and seeded random weights for machines that have none."""

from __future__ import annotations

from typing import Protocol

import torch
import xxhash
from torch import Tensor

from diptych.engine.config import ModelConfig
from diptych.engine.model_shapes import Shapes


class WeightSource(Protocol):
    """Where a model's tensors come from."""

    @property
    def digest(self) -> bytes:
        """16 bytes that differ whenever a weight or the config differs."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, on the host, in its stored dtype."""

    def close(self) -> None:
        """Lets go of files. Idempotent."""


class RandomWeights:
    """Seeded random weights of a config's shapes, for machines without weights. Equal on every machine."""

    def __init__(self, config: ModelConfig, shapes: Shapes, seed: int) -> None:
        self._config = config
        self._shapes = shapes
        self._seed = seed

    @property
    def digest(self) -> bytes:
        """XXH3-128 over config and seed."""
        return xxhash.xxh3_128_digest(repr((self._config, self._seed)).encode())

    def tensor(self, name: str) -> Tensor:
        """Matrices with unit gain, norms near one, biases near zero."""
        name_seed = xxhash.xxh3_64_intdigest(f"{self._seed} {name}".encode())
        generator = torch.Generator().manual_seed(name_seed >> 1)
        shape = self._shapes[name]
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return values * float(shape[-1] ** -0.5)
        return values * 0.1 + (1.0 if "norm" in name else 0.0)

    def close(self) -> None:
        """Nothing is held open."""
