"""Reading config.json: what is served, and refusals that say which file, field and bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diptych.domain.errors import Unsupported
from diptych.engine.config import Rope, read_config
from tests.support.tiny_llama import write_config


def test_a_llama(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path))
    assert (config.num_layers, config.hidden_size, config.ff_size) == (3, 48, 80)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (6, 2, 8)
    assert config.qkv_sizes == (48, 16, 16)
    assert config.rope == Rope(10000.0)
    assert config.eos_token_ids == (2,)
    assert config.tied_embeddings
    assert not config.qkv_bias


def test_what_may_be_absent(tmp_path: Path) -> None:
    absent = (
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
        "eos_token_id",
        "rope_theta",
        "hidden_act",
    )
    config = read_config(write_config(tmp_path, **dict.fromkeys(absent)))
    assert config.num_kv_heads == 6
    assert config.head_size == 8
    assert not config.tied_embeddings
    assert config.eos_token_ids == ()
    assert config.rope.theta == 10000.0


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(10000.0, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, Rope(10000.0)),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            Rope(5e5, "llama3", 8.0, 1.0, 4.0, 256),
        ),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(1e6)),
    ],
)
def test_rotary_settings_of_old_and_new_files(tmp_path: Path, changes: dict[str, Any], rope: Rope) -> None:
    assert read_config(write_config(tmp_path, **changes)).rope == rope


def test_qwen2_has_biases_and_mistral_full_attention(tmp_path: Path) -> None:
    qwen = write_config(
        tmp_path / "q", architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=32
    )
    mistral = write_config(tmp_path / "m", architectures=["MistralForCausalLM"], eos_token_id=[2, 3])
    assert read_config(qwen).qkv_bias
    assert read_config(mistral).eos_token_ids == (2, 3)
    wide = write_config(tmp_path / "w", architectures=["MistralForCausalLM"], sliding_window=1024)
    assert read_config(wide).architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures is \['GPT2LMHeadModel'\]; served: LlamaForC",
        ),
        ({"architectures": None}, "architectures is"),
        ({"architectures": "LlamaForCausalLM"}, "a list of names"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; served: silu"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"mlp_bias": "yes"}, "true or false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding_window is 64"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64},
            "sliding_window is 64",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling\.rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; served: an object"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; served: a divisor of 6"),
        ({"head_dim": 7}, "head_dim is 7; served: an even number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 3.5}, "vocab_size is 3.5"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ],
)
def test_refusals_name_file_field_and_bound(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message) as refused:
        read_config(write_config(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "list")]
)
def test_a_torn_config(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(Unsupported, match=message):
        read_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"config\.json: cannot be read"):
        read_config(tmp_path / "nowhere")
