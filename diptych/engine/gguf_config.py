"""A GGUF's metadata and tensor names as Hugging Face's: config.json, generation_config.json and
tokenizer_config.json.

What the engine would compute otherwise than llama.cpp (experts, scaled rotary embedding, sliding windows,
heads that differ by layer) is refused here by its key, before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from diptych.domain.errors import Unsupported
from diptych.engine.safetensors_file import TensorSpec

Fields = Mapping[str, Any]
"""A GGUF's metadata by key: numbers, strings, lists of them."""

_REFUSED = ("expert_count", "rope.scaling.type", "attention.sliding_window")
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a tensor; None for one that a served Llama has not."""
    if name.startswith("blk."):
        _, layer, part = name.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_TENSORS[part]}" if part in _LAYER_TENSORS else None
    return _TENSORS.get(name)


def model_config(fields: Fields, specs: Mapping[str, TensorSpec], source: str) -> dict[str, Any]:
    """config.json of a Llama; `specs` are its tensors by GGUF name. Raises Unsupported, naming `source`."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise Unsupported(f"{source}: architecture {architecture!r} is not served from GGUF (served: llama)")
    for key in _REFUSED:
        value = fields.get(f"llama.{key}")
        if value not in (None, 0, "none"):
            raise Unsupported(f"{source}: llama.{key} = {value!r} is not served")
    try:
        config = _shape(fields, source) | _embedding(specs)
    except KeyError as error:
        raise Unsupported(f"{source}: torn: {error} is missing") from None
    missing = _expected(config["num_hidden_layers"]) - specs.keys()
    if missing:
        raise Unsupported(f"{source}: torn: {len(missing)} tensors are missing, such as {min(missing)!r}")
    num_tokens = len(fields.get("tokenizer.ggml.tokens") or ())
    if num_tokens > config["vocab_size"]:
        raise Unsupported(f"{source}: {num_tokens} tokens, but embeddings for {config['vocab_size']}")
    return config | generation_config(fields)


def generation_config(fields: Fields) -> dict[str, Any]:
    """generation_config.json: the ids that begin, end and pad."""
    keys = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {key: fields.get(f"tokenizer.ggml.{name}_token_id") for name, key in keys.items()}
    return {key: token_id for key, token_id in found.items() if token_id is not None}


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """tokenizer_config.json: named tokens and the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if (token_id := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{key}_token"] = tokens[token_id]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _shape(fields: Fields, source: str) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    kv_heads = fields.get("llama.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise Unsupported(f"{source}: head counts that differ by layer are not served")
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise Unsupported(f"{source}: rotary embedding over a part of the head is not served")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _short(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _expected(num_layers: int) -> set[str]:
    """Every tensor that a Llama of so many layers has; "output.weight" is absent where embeddings are
    tied."""
    layers = {f"blk.{i}.{part}" for i in range(num_layers) for part in _LAYER_TENSORS}
    return layers | _TENSORS.keys() - {"output.weight"}


def _embedding(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    embedding = specs["token_embd.weight"]
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in specs,
        "torch_dtype": _DTYPES[embedding.dtype],
    }


def _short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
