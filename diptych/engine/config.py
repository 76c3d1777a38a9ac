"""What a model is, read from a Hugging Face `config.json` and refused when we would compute something else.

Served: LlamaForCausalLM, MistralForCausalLM (full attention) and Qwen2ForCausalLM (bias on Q, K and V);
rotary embeddings plain, linearly scaled, or scaled as in Llama 3. A field that changes the mathematics and
is not listed here leads to `Unsupported`, never to a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from diptych.domain.errors import Unsupported
from diptych.engine.config_fields import Fields

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `factor` stretches positions ("linear", "llama3"); the rest is for "llama3"."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one Llama-family model."""

    architecture: str
    num_layers: int
    hidden_size: int
    ff_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope: Rope
    qkv_bias: bool
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Columns of Q, K and V in the fused projection."""
        kv_size = self.num_kv_heads * self.head_size
        return self.num_heads * self.head_size, kv_size, kv_size


def read_config(directory: Path) -> ModelConfig:
    """The model in `directory`. Raises Unsupported naming the file, what it says and what is served."""
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unsupported(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Unsupported(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Unsupported(f"{path}: holds a {type(content).__name__}, expected an object")
    return _parse(Fields(path, content))


def _parse(fields: Fields) -> ModelConfig:
    names = fields.names("architectures")
    architecture = names[0] if len(names) == 1 else ""
    if architecture not in ARCHITECTURES:
        raise fields.unsupported("architectures", list(names), " or ".join(ARCHITECTURES))
    _refuse_other_mathematics(fields, architecture)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden_size,
        ff_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_size=fields.count("head_dim", hidden_size // num_heads),
        vocab_size=fields.count("vocab_size"),
        max_positions=fields.count("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        tied_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=fields.ids("eos_token_id"),
    )
    if config.num_heads % config.num_kv_heads:
        raise fields.unsupported("num_key_value_heads", config.num_kv_heads, f"a divisor of {num_heads}")
    if config.head_size % 2:
        raise fields.unsupported("head_dim", config.head_size, "an even number")
    return config


def _refuse_other_mathematics(fields: Fields, architecture: str) -> None:
    """Raises Unsupported for fields that would change what the model computes."""
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", fields.get("hidden_act"), "silu")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name):
            raise fields.unsupported(name, True, "false")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.unsupported("partial_rotary_factor", fields.get("partial_rotary_factor"), "1.0")
    if (quantised := fields.inner("quantization_config")) is not None:
        served = "no quantization: weights in float32, bfloat16 or float16, or a .gguf file of the model"
        raise quantised.unsupported("quant_method", quantised.get("quant_method", "unnamed"), served)
    window = fields.get("sliding_window")
    slides = fields.flag("use_sliding_window") if architecture == "Qwen2ForCausalLM" else window is not None
    if slides and fields.count("sliding_window") < fields.count("max_position_embeddings"):
        raise fields.unsupported("sliding_window", window, "null (full attention)")


def _rope(fields: Fields) -> Rope:
    """Rotary settings as transformers 5 writes them (`rope_parameters`) or as earlier versions did."""
    inner = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    theta = (inner if inner and inner.get("rope_theta") is not None else fields).number("rope_theta", 10000.0)
    if inner is None:
        return Rope(theta)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", inner.number("factor"))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            inner.count("original_max_position_embeddings"),
        )
    raise inner.unsupported("rope_type", kind, " or ".join(ROPE_TYPES))
