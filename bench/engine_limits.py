"""How near the engine is to the machine: MBU (bytes a second over what memory gives) and MFU (the same of
arithmetic), against limits that are measured in the same run.

A decode step reads the weights once and each sequence's keys and values; a prompt costs two operations a
weight and token, and attention on top. The output head runs for one row of a prompt, so it is left out there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.driver import Driver
from bench.harness import Sheet
from diptych.engine.config import read_config
from diptych.engine.weights import num_parameters

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What so many threads of this machine reach."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What the model makes the machine do, in bf16."""

    num_weights: int
    """Without the embeddings, with the head."""
    num_head_weights: int
    kv_bytes_per_token: int
    attention_width: int
    """Query heads times head size, over all layers."""

    def decode_bytes(self, batch: int, context: float) -> float:
        """Read by one step."""
        return self.num_weights * _BF16_BYTES + batch * context * self.kv_bytes_per_token

    def decode_flops(self, batch: int, context: float) -> float:
        """Computed by one step."""
        return batch * (2.0 * self.num_weights + 4.0 * context * self.attention_width)

    def prefill_flops(self, num_tokens: int) -> float:
        """Computed for one prompt; a position sees half of the prompt on average."""
        linear = 2.0 * (self.num_weights - self.num_head_weights) * num_tokens
        return linear + 4.0 * self.attention_width * num_tokens**2 / 2

    def prefill_usage(
        self, name: str, num_tokens: int, rates: Sequence[float], limits: Limits
    ) -> tuple[str | float, ...]:
        """A line of `usage_sheet`."""
        if not rates:
            return (name, "–", "–", "–", "–", "–")
        flops = self.prefill_flops(num_tokens) / num_tokens * median(rates)
        ms = num_tokens / median(rates) * 1e3
        return (name, ms, "–", "–", flops / 1e9, _share(flops / limits.flops_per_s))

    def decode_usage(
        self, name: str, batch: int, context: int, rates: Sequence[float], limits: Limits
    ) -> tuple[str | float, ...]:
        """A line of `usage_sheet`."""
        if not rates:
            return (name, "–", "–", "–", "–", "–")
        step_s = batch / median(rates)
        read = self.decode_bytes(batch, context) / step_s
        flops = self.decode_flops(batch, context) / step_s
        return (
            name, step_s * 1e3, read / 1e9, _share(read / limits.read_bytes_per_s), flops / 1e9,
            _share(flops / limits.flops_per_s),
        )  # fmt: skip


def _share(value: float) -> str:
    return f"{value:.0%}"


def model_cost(directory: str) -> ModelCost:
    """From the model's configuration."""
    config = read_config(Path(directory))
    head = config.vocab_size * config.hidden_size
    tied = num_parameters(config) - head
    return ModelCost(
        num_weights=tied + head if config.tied_embeddings else tied,
        num_head_weights=head,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_size * _BF16_BYTES,
        attention_width=config.num_layers * config.num_heads * config.head_size,
    )


def measured_limits(threads: int) -> Limits:
    """Raises NotRun when they can't be measured."""
    driver = Driver("limits", [sys.executable, "-m", "bench.drivers.limits", str(threads)],
                    {"OMP_NUM_THREADS": str(threads)})  # fmt: skip
    try:
        reads = [driver.call("read") for _ in range(3)]
        products = [driver.call("gemm") for _ in range(3)]
    finally:
        driver.close()
    return Limits(max(reads), max(products))


def usage_sheet(threads: int, limits: Limits, lines: list[tuple[str | float, ...]]) -> Sheet:
    """MBU and MFU of every case."""
    title = (
        f"ours against the machine, {threads}T: it reads {limits.read_bytes_per_s / 1e9:.0f} GB/s and "
        f"computes {limits.flops_per_s / 1e9:.0f} GFLOP/s in bf16"
    )
    return Sheet(title, ("case", "ms", "GB/s", "MBU", "GFLOP/s", "MFU"), lines)
