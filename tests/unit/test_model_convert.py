"""GGUF conversion: values, row order and names come back; what is torn or not served is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
import torch
from numpy.typing import NDArray

from diptych.domain.errors import Unsupported
from diptych.engine import safetensors_file
from diptych.engine.convert import convert, to_bfloat16
from diptych.engine.gguf_config import hf_name
from tests.support.tiny_gguf import TEMPLATE, Weights, random_weights, vocabulary, write_llama

pytestmark = pytest.mark.engine


def converted(tmp_path: Path, weights: Weights, kind: str = "F32", **fields: Any) -> Path:
    source, directory = tmp_path / "x.gguf", tmp_path / "x"
    write_llama(source, weights, kind, {key.replace("__", "."): value for key, value in fields.items()})
    directory.mkdir()
    convert(source, directory)
    return directory


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def rounded(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """What a matrix holds after a trip through format `kind`, in Hugging Face's row order."""
    code = gguf.GGMLQuantizationType[kind]
    return gguf.dequantize(gguf.quantize(values, code), code)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_comes_back(tmp_path: Path, kind: str, tied: bool) -> None:
    weights = random_weights(1, tied=tied)
    directory = converted(tmp_path, weights, kind)
    found = loaded(directory)
    assert set(found) == {hf_name(name) for name in weights}
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    for name, values in weights.items():
        tensor = found[hf_name(name) or ""]
        if values.ndim == 1:
            assert torch.equal(tensor, torch.from_numpy(values))
        else:
            assert tensor.dtype == dtype
            assert torch.equal(tensor, torch.from_numpy(rounded(values, kind)).to(dtype)), name
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_a_k_quant_whose_values_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_K by hand: d = 1, no minimum, every scale 1, every nibble 3, so that every weight is 3."""
    head = np.array([1, 0], np.float16).tobytes() + bytes([1] * 4 + [0] * 4 + [1] * 4)
    block = np.frombuffer(head + b"\x33" * 128, np.uint8)
    monkeypatch.setattr(
        gguf, "quantize", lambda values, kind: np.tile(block, (len(values), values.shape[1] // 256))
    )
    directory = converted(tmp_path, random_weights(2, hidden=256, ffn=512, heads=16), "Q4_K")
    found = loaded(directory)
    assert sum(tensor.ndim == 2 and bool((tensor == 3).all()) for tensor in found.values()) == 1 + 2 * 7


def test_the_config_is_an_ordinary_one(tmp_path: Path) -> None:
    directory = converted(tmp_path, random_weights(3))
    config = json.loads((directory / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    names = json.loads((directory / "tokenizer_config.json").read_text())
    assert (names["bos_token"], names["eos_token"]) == ("<|start|>", "<|end|>")
    assert names["chat_template"] == TEMPLATE
    assert json.loads((directory / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 0,
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general__architecture": "gpt2"}, "architecture 'gpt2' is not served from GGUF"),
    ({"llama__expert_count": 8}, "llama.expert_count = 8 is not served"),
    ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type = 'yarn' is not served"),
    ({"llama__attention__sliding_window": 64}, "llama.attention.sliding_window = 64 is not served"),
    ({"llama__attention__head_count_kv": [2, 1]}, "head counts that differ by layer"),
    ({"llama__rope__dimension_count": 8}, "rotary embedding over a part of the head"),
    ({"llama__embedding_length": None}, "torn: 'llama.embedding_length' is missing"),
    ({"llama__block_count": 3}, "torn: 9 tensors are missing, such as 'blk.2.attn_k.weight'"),
    ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not served (served: codeshell,"),
    ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre None is not served"),
    ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model 'bert' is not served (served: gpt2, llama)"),
    ({"tokenizer__ggml__tokens": None}, "holds no tokenizer"),
    ({"tokenizer__ggml__merges": ["no such"]}, "torn: its tokenizer makes no sense"),
    ({"tokenizer__ggml__token_type": [1, 2]}, "torn: its tokenizer makes no sense"),
    ({"tokenizer__ggml__bos_token_id": 999}, "tokenizer.ggml.bos_token_id is outside of the vocabulary"),
    ({"tokenizer__ggml__tokens": [f"t{i}" for i in range(300)]}, "300 tokens, but embeddings for 263"),
]


@pytest.mark.parametrize(("fields", "expected"), REFUSED)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(Unsupported) as caught:
        converted(tmp_path, random_weights(4), **fields)
    assert str(tmp_path / "x.gguf") in str(caught.value)
    assert expected in str(caught.value)


def test_a_tensor_that_a_llama_has_not(tmp_path: Path) -> None:
    weights = dict(random_weights(5)) | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(Unsupported, match=r"tensor 'blk\.0\.attn_q\.bias' is not one of a Llama"):
        converted(tmp_path, weights)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    weights = dict(random_weights(6))
    weights["blk.1.ffn_up.weight"][3, 3] = np.nan
    with pytest.raises(
        Unsupported, match=r"torn: tensor 'blk\.1\.ffn_up\.weight' holds values that are not finite"
    ):
        converted(tmp_path, weights)


def test_a_torn_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    source, directory = tmp_path / "x.gguf", tmp_path / "x"
    write_llama(source, random_weights(7))
    whole = source.read_bytes()
    for share in (0, 1e-5, 0.01, 0.1, 0.5, 0.9, 0.999):
        source.write_bytes(whole[: int(len(whole) * share)])
        directory.mkdir()
        with pytest.raises(Unsupported, match=r"x\.gguf: (torn|can't be read)"):
            convert(source, directory)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    source.write_bytes(b"PK" + whole[2:])
    directory.mkdir()
    with pytest.raises(Unsupported, match="torn, or not a GGUF file"):
        convert(source, directory)


def test_bfloat16_rounds_to_nearest_even() -> None:
    draw = np.random.default_rng(0)
    values = draw.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    ties = (np.arange(1 << 15, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)).view(np.float32)
    values = np.concatenate([values, ties[np.isfinite(ties)]])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(values), expected)


TORN: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda whole: b"", "torn, or not safetensors: 0 bytes"),
    (lambda whole: whole[:100], "torn, or not safetensors"),
    (lambda whole: whole[:-1], "torn: .* bytes, its header speaks of"),
    (lambda whole: whole + b"x", "torn: .* bytes, its header speaks of"),
    (lambda whole: whole[:8] + b"[" + whole[9:], "its header is not readable"),
    (lambda whole: b"\xff" * 8 + whole[8:], "torn, or not safetensors"),
]


@pytest.mark.parametrize(("tear", "expected"), TORN)
def test_a_torn_safetensors_file(tmp_path: Path, tear: Callable[[bytes], bytes], expected: str) -> None:
    path = tmp_path / "model.safetensors"
    spec = safetensors_file.TensorSpec("a", "F32", (100, 10))
    safetensors_file.write(path, [spec], [np.ones((100, 10), np.float32)])
    assert safetensors_file.read_header(path)[1] == [spec]
    path.write_bytes(tear(path.read_bytes()))
    with pytest.raises(Unsupported, match=expected):
        safetensors_file.read_header(path)


def test_a_tensor_of_another_size_is_not_written(tmp_path: Path) -> None:
    spec = safetensors_file.TensorSpec("a", "F32", (3,))
    with pytest.raises(ValueError, match="a: 8 bytes, not 12"):
        safetensors_file.write(tmp_path / "x", [spec], [np.ones(2, np.float32)])
