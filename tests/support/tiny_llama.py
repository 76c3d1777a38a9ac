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


def write_checkpoint(directory: Path, config: Any, seed: int = 0, **save_options: Any) -> Any:
    """Saves a random model of a transformers `config` in `directory` and returns it, in fp32, as the oracle.

    Weights are spread wider than transformers' initial ones, so that attention and logits are far from flat.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            tensor.normal_(centre, 0.2 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5)
    model.save_pretrained(directory, **save_options)
    return model
