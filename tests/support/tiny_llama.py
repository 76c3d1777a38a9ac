"""Small Llama-family model directories for tests: a config alone, or a checkpoint that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}

REAL_SHAPES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""The default model's shapes, with fewer layers and the tiny vocabulary."""


def write_config(directory: Path, **changes: Any) -> Path:
    """config.json of a tiny Llama with `changes`; a value of None takes the key away."""
    fields = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory
