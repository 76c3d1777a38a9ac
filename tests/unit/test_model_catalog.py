"""From a name to a directory the engine can load, or to an error that names the file and what is served."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.domain.errors import DiptychError, InvalidField, Unsupported
from diptych.engine import catalog, fetch, safetensors_file, toy
from diptych.engine.catalog import ModelRef, resolve, weights_digest
from tests.support.tiny_gguf import random_weights, write_llama
from tests.support.tiny_model import tiny_directory

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("catalog"))


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "my-model"))


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


def test_the_toy() -> None:
    assert resolve("toy") == ModelRef("toy", Path("toy"), "toy")
    assert weights_digest(Path("toy")) == toy.LAYOUT.model_digest


def test_a_directory(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(directory)) == ModelRef("my-model", directory, "hf")
    monkeypatch.chdir(tmp_path)
    assert resolve("my-model") == resolve("./my-model/") == ModelRef("my-model", directory, "hf")


def test_a_gguf_file_is_converted_once(tmp_path: Path, original: Path, cache: Path) -> None:
    source = tmp_path / "my.Q8.GGUF"
    write_llama(source, random_weights(0))
    steps: list[tuple[str, int, int]] = []
    found = resolve(str(source), lambda *step: steps.append(step))
    assert (found.name, found.kind, found.path.parent) == ("my.Q8", "hf", cache / "models")
    assert (found.path / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert steps[0] == ("converting", 0, 20)
    assert steps[-1] == ("converting", 20, 20)
    steps.clear()
    assert resolve(str(source), lambda *step: steps.append(step)) == found
    assert steps == []
    assert catalog.installed() == [ModelRef(found.path.name, found.path, "hf")]
    write_llama(source, random_weights(1))
    other = resolve(str(source))
    assert other.name == found.name
    assert other.path != found.path
    assert weights_digest(other.path) != weights_digest(found.path)


def test_what_the_converter_refuses_reaches_the_caller(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "m.gguf"
    write_llama(source, random_weights(0), fields={"llama.expert_count": 8})
    with pytest.raises(Unsupported, match=r"m\.gguf: llama\.expert_count = 8 is not served"):
        resolve(str(source))
    assert catalog.installed() == []
    source.write_bytes(source.read_bytes()[:5000])
    with pytest.raises(Unsupported, match=r"m\.gguf: torn"):
        resolve(str(source))


NOWHERE = [
    "",
    "nowhere",
    "./a/b",
    "/no/such/directory",
    "~/no/such",
    "a/b/c",
    "a b/c",
    "m.gguf",
    "x" * 5000,
    "a\0b",
    "~nobody-here/x",
    "x" * 300 + ".gguf",
]


@pytest.mark.parametrize("name", NOWHERE)
def test_a_name_that_leads_nowhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "..")
    with pytest.raises(InvalidField) as caught:
        resolve(name)
    assert caught.value.field == "model"


def weights_of(directory: Path, *specs: tuple[str, str, tuple[int, ...]]) -> None:
    tensors = [safetensors_file.TensorSpec(*spec) for spec in specs]
    arrays = [np.zeros(spec.num_bytes, np.uint8) for spec in tensors]
    safetensors_file.write(directory / "model.safetensors", tensors, arrays)


Damage = Callable[[Path], object]


def config(**changes: Any) -> Damage:
    return lambda directory: edit(directory / "config.json", **changes)


def text(name: str, content: str) -> Damage:
    return lambda directory: (directory / name).write_text(content)


def cut(name: str, size: int) -> Damage:
    return lambda directory: os.truncate(directory / name, size)


def gone(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def tensors(*specs: tuple[str, str, tuple[int, ...]]) -> Damage:
    return lambda directory: weights_of(directory, *specs)


EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
BROKEN: list[tuple[Damage, str]] = [
    (gone("config.json"), "config.json: cannot be read: No such file"),
    (text("config.json", "{"), "config.json: is not JSON"),
    (config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    (config(architectures=None), "LlamaForCausalLM"),
    (config(quantization_config={"bits": 4}), "quantization_config"),
    (config(vocab_size=262), f"tensor {EMBEDDING} is [263, 64], config.json says [262, 64]"),
    (gone("model.safetensors"), "model.safetensors: missing"),
    (cut("model.safetensors", 4000), "model.safetensors: torn: 4000 bytes, its header speaks of"),
    (gone("tokenizer.json"), "tokenizer.json: missing"),
    (cut("tokenizer.json", 1000), "tokenizer.json: torn, or not a tokenizer"),
    (tensors(("other", "F32", (1,))), f"tensor {EMBEDDING} is missing (and 19 more)"),
    (text(INDEX, '{"weight_map": {"a": "b.safetensors"}}'), "b.safetensors: missing"),
    (text(INDEX, "{}"), "index.json: torn: it names no files"),
    (text(INDEX, '{"weight_map": {"a": "../x"}}'), "index.json: torn: it names '../x'"),
    (text(INDEX, '{"weight_map": {"a": 1}}'), "index.json: torn: it names 1"),
]


@pytest.mark.parametrize(("damage", "expected"), BROKEN)
def test_a_directory_that_can_not_be_loaded(directory: Path, damage: Damage, expected: str) -> None:
    damage(directory)
    with pytest.raises(Unsupported) as caught:
        resolve(str(directory))
    assert expected in str(caught.value)
    assert str(directory) in str(caught.value)


def specs_of(directory: Path) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    specs = safetensors_file.read_header(directory / "model.safetensors")[1]
    return {spec.name: (spec.name, spec.dtype, spec.shape) for spec in specs}


def test_a_tokenizer_with_more_ids_than_the_model(directory: Path) -> None:
    specs = specs_of(directory) | {EMBEDDING: (EMBEDDING, "F32", (260, 64))}
    weights_of(directory, *specs.values())
    edit(directory / "config.json", vocab_size=260)
    with pytest.raises(
        Unsupported, match=r"tokenizer\.json: ids up to 262, but the model's vocabulary has 260"
    ):
        resolve(str(directory))


def test_shards_are_one_model(directory: Path) -> None:
    specs = list(specs_of(directory).values())
    (directory / "model.safetensors").unlink()

    def shard(number: int, *of: tuple[str, str, tuple[int, ...]], fill: int = 0) -> None:
        tensors = [safetensors_file.TensorSpec(*spec) for spec in of]
        arrays = [np.full(spec.num_bytes, fill, np.uint8) for spec in tensors]
        safetensors_file.write(directory / f"model-{number}.safetensors", tensors, arrays)

    parts = {1: specs[::2], 2: specs[1::2]}
    for number, part in parts.items():
        shard(number, *part)
    index = {spec[0]: f"model-{number}.safetensors" for number, part in parts.items() for spec in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": index}))
    assert resolve(str(directory)).path == directory
    before = weights_digest(directory)
    shard(2, *parts[2], fill=1)
    assert weights_digest(directory) != before
    shard(2, *parts[2][1:])
    with pytest.raises(Unsupported, match=f"tensor {parts[2][0][0]} is missing"):
        resolve(str(directory))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_text("x")
    with pytest.raises(Unsupported, match=r"x\.bin: neither a model directory nor a \.gguf file"):
        resolve(str(tmp_path / "x.bin"))


DIGEST = "import sys; from pathlib import Path; from diptych.engine.catalog import weights_digest; "
DIGEST += "print(weights_digest(Path(sys.argv[1])).hex()); assert 'torch' not in sys.modules"


def test_the_digest_is_the_same_in_every_process_and_for_every_copy(directory: Path, original: Path) -> None:
    found = weights_digest(directory)
    assert len(found) == 16
    assert found == weights_digest(original)
    for seed in ("1", "2"):
        environment = dict(os.environ) | {"PYTHONHASHSEED": seed, "DIPTYCH_CACHE": str(directory / seed)}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST, str(directory)],
            capture_output=True, text=True, env=environment, timeout=50, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == found.hex()


def test_other_weights_under_the_same_name_have_another_digest(directory: Path) -> None:
    before = weights_digest(directory)
    path = directory / "model.safetensors"
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = weights_digest(directory)
    assert after != before
    edit(directory / "config.json", rope_theta=1.0)
    assert weights_digest(directory) not in (before, after)


def test_the_command_prints_the_place(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch.main([str(directory)]) == 0
    assert capsys.readouterr().out == f"{directory}\n"
    source = tmp_path / "m.gguf"
    write_llama(source, random_weights(0))
    assert fetch.main([str(source)]) == 0
    shown = capsys.readouterr()
    assert "converting" in shown.err
    assert Path(shown.out.strip(), "model.safetensors").is_file()
    assert fetch.main(["no-such-model"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("diptych: model: 'no-such-model' is no directory")
    assert len(shown.err.splitlines()) == 1


def test_a_converter_that_dies_is_our_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "m.gguf"
    write_llama(source, random_weights(0))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DiptychError, match="the converter ended with 1"):
        resolve(str(source))
