"""What a user reads who asks for a model that can't be served: whole messages, as `diptych up` prints them.

Each names the file or field, what it says, and what would be served or what to do.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.cli.assemble import UpOptions, assembled
from diptych.cli.console import advise
from diptych.domain.errors import DiptychError, InvalidField, TooLarge
from diptych.engine import safetensors_file
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings
from tests.support.tiny_gguf import random_weights, write_llama
from tests.support.tiny_model import tiny_directory

pytestmark = pytest.mark.engine

EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
SERVED = "LlamaForCausalLM or MistralForCausalLM or Qwen2ForCausalLM"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("bad-models"))


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "m"))


def said(model: Path | str) -> str:
    """What `diptych up --model` prints, in one line."""
    with pytest.raises(DiptychError) as refused, assembled(UpOptions(str(model))):
        pass
    advice = advise(refused.value)
    return f"{refused.value}" + (f" → {advice}" if advice else "")


def configured(model: Path, **changes: Any) -> Path:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def rewritten(model: Path, change: Callable[[dict[str, safetensors_file.TensorSpec]], object]) -> Path:
    """The same weights file with other tensors, of zeros."""
    path = model / "model.safetensors"
    specs = {spec.name: spec for spec in safetensors_file.read_header(path)[1]}
    change(specs)
    arrays = [np.zeros(spec.num_bytes, np.uint8) for spec in specs.values()]
    safetensors_file.write(path, list(specs.values()), arrays)
    return path


def test_an_architecture_that_is_not_served(model: Path) -> None:
    path = configured(model, architectures=["Gemma3ForCausalLM"])
    assert said(model) == f"{path}: architectures is ['Gemma3ForCausalLM']; served: {SERVED}"


def test_a_quantisation_that_is_not_served(model: Path) -> None:
    path = configured(model, quantization_config={"quant_method": "gptq", "bits": 4})
    assert said(model) == (
        f"{path}: quantization_config.quant_method is 'gptq'; served: no quantization: weights in float32, "
        "bfloat16 or float16, or a .gguf file of the model"
    )


def test_a_tensor_format_that_is_not_served(model: Path) -> None:
    path = rewritten(
        model, lambda specs: specs.update({QUERY: safetensors_file.TensorSpec(QUERY, "U8", (64, 64))})
    )
    assert said(model) == (
        f"{path}: tensor {QUERY} is U8; served: F32, BF16, F16 (take the model's unquantised weights)"
    )


def test_a_gguf_of_another_architecture(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_llama(path, random_weights(0), fields={"general.architecture": "mamba"})
    assert said(path) == f"{path}: architecture 'mamba' is not served from GGUF (served: llama)"


def test_truncated_weights(model: Path) -> None:
    path = model / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 7)
    expected = f"{path}: torn: {size - 7} bytes, its header speaks of {size} (copy or fetch it again)"
    assert said(model) == expected


def test_truncated_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_llama(path, random_weights(0))
    os.truncate(path, path.stat().st_size // 2)
    message = said(path)
    assert message.startswith(f"{path}: torn, or not a GGUF file (")
    assert message.endswith("): copy or fetch it again")


def test_weights_of_another_model(model: Path) -> None:
    path = rewritten(
        model, lambda specs: specs.update({QUERY: safetensors_file.TensorSpec(QUERY, "F32", (64, 32))})
    )
    assert said(model) == (
        f"{path}: tensor {QUERY} is [64, 32], config.json says [64, 64]: one of the two is of another model"
    )


def test_weights_with_a_part_missing(model: Path) -> None:
    rewritten(model, lambda specs: [specs.pop(name) for name in list(specs) if "layers.1." in name])
    first = "model.layers.1.input_layernorm.weight"
    assert said(model) == (
        f"{model}: tensor {first} is missing (and 8 more): a file was not copied, or config.json is of "
        "another model"
    )


def test_weights_with_a_part_too_many(model: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    path = rewritten(
        model, lambda specs: specs.update({name: safetensors_file.TensorSpec(name, "F32", (16,))})
    )
    assert said(model) == (
        f"{path}: tensor {name} does not belong to the architecture that config.json names"
    )


def test_a_tokenizer_of_another_model(model: Path) -> None:
    rewritten(
        model,
        lambda specs: specs.update({EMBEDDING: safetensors_file.TensorSpec(EMBEDDING, "F32", (200, 64))}),
    )
    configured(model, vocab_size=200)
    assert said(model) == (
        f"{model}/tokenizer.json: ids up to 262, but the model's vocabulary has 200: take the "
        "tokenizer.json that belongs to these weights"
    )


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert said(model) == f"{model}/tokenizer.json: missing (tokenizers are read from tokenizer.json only)"


def test_a_name_that_leads_nowhere() -> None:
    assert said("my model") == (
        "model: 'my model' is no directory or .gguf file here, no hub id, and neither smollm2-135m nor toy"
    )


def test_a_context_past_the_models(model: Path) -> None:
    """Said by the worker, whose last lines `up` quotes."""
    with pytest.raises(InvalidField) as refused:
        open_runner(EngineSettings(str(model), max_context=1 << 20))
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert str(refused.value) == f"max_context: the model has {positions} positions, is {1 << 20}"


def test_not_enough_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a weight is read: there are none here."""
    (model / "model.safetensors").unlink()
    monkeypatch.setattr("diptych.engine.runner.available_bytes", lambda device: 300 << 20)
    with pytest.raises(TooLarge) as refused:
        open_runner(EngineSettings(str(model), num_blocks=100_000))
    assert str(refused.value) == (
        "m needs 646 MiB: weights 0, KV pool 390 (100000 blocks of 16 tokens), activations 256; available: "
        "300 MiB; 11217 blocks would fit (179472 tokens: --num-blocks, --max-context)"
    )
