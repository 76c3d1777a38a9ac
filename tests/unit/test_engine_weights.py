"""Weight files that are torn, incomplete or foreign: refused before anything is loaded, by file and
tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.domain.errors import Unsupported
from diptych.engine.config import read_config
from diptych.engine.runner import open_torch_runner
from diptych.engine.settings import EngineSettings
from diptych.engine.weight_files import WeightFiles
from diptych.engine.weight_source import RandomWeights
from diptych.engine.weights import HEAD, layer_weights, num_parameters, shapes_of
from tests.support.tiny_llama import write_config

pytestmark = pytest.mark.engine

Q = "model.layers.1.self_attn.q_proj.weight"
FILE = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny tied Llama as a single file."""
    write_config(tmp_path)
    config = read_config(tmp_path)
    shapes = shapes_of(config)
    source = RandomWeights(config, shapes, 3)
    save_file({name: source.tensor(name) for name in shapes}, tmp_path / FILE)
    return tmp_path


def _open(directory: Path) -> WeightFiles:
    return WeightFiles(directory, shapes_of(read_config(directory)), frozenset({HEAD}))


def _edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE)


def test_tensors_come_back(directory: Path) -> None:
    source = _open(directory)
    config = read_config(directory)
    layer = layer_weights(source, config, 1, torch.float32, "cpu")
    assert torch.equal(layer.qkv[:48], source.tensor(Q))
    assert torch.equal(layer.gate_up[80:], source.tensor("model.layers.1.mlp.up_proj.weight"))
    assert layer.qkv_bias is None
    assert num_parameters(config) == sum(tensor.numel() for tensor in load_file(directory / FILE).values())
    source.close()
    source.close()


def test_copies_that_follow_from_others_are_tolerated(directory: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = torch.zeros(320, 48)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    _edit(directory, change)
    _open(directory).close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), f"tensor {Q} is missing"),
        (lambda t: [t.pop(name) for name in list(t)[:3]], r"is missing \(and 2 more\)"),
        (lambda t: t.update(extra=torch.zeros(2)), f"{FILE}: tensor extra does not belong"),
        (
            lambda t: t.update({Q: torch.zeros(48, 47)}),
            rf"tensor {Q} is \[48, 47\], config.json says \[48, 48\]",
        ),
        (lambda t: t.update({Q: torch.zeros(48, 48).to(torch.int8)}), f"tensor {Q} is I8; served: F32, BF16"),
    ],
)
def test_a_file_that_does_not_fit_its_config(
    directory: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    _edit(directory, change)
    with pytest.raises(Unsupported, match=message):
        _open(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_torn_file(directory: Path, keep: int) -> None:
    path = directory / FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Unsupported, match=rf"{FILE}: is torn or no safetensors file"):
        _open(directory)


def test_no_file(directory: Path) -> None:
    (directory / FILE).unlink()
    with pytest.raises(Unsupported, match=FILE):
        open_torch_runner(EngineSettings(str(directory), num_blocks=2))


def _shard(directory: Path, where: Callable[[int], str]) -> None:
    tensors = load_file(directory / FILE)
    (directory / FILE).unlink()
    names = {name: where(i) for i, name in enumerate(tensors)}
    for shard in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == shard}, directory / shard)
    (directory / f"{FILE}.index.json").write_text(json.dumps({"weight_map": names}))


def test_shards(directory: Path) -> None:
    whole = _open(directory).tensor(Q)
    _shard(directory, lambda i: f"part-{i % 3}.safetensors")
    assert torch.equal(_open(directory).tensor(Q), whole)


def test_a_missing_shard(directory: Path) -> None:
    _shard(directory, lambda i: f"part-{i % 3}.safetensors")
    (directory / "part-1.safetensors").unlink()
    with pytest.raises(Unsupported, match=r"part-1\.safetensors"):
        _open(directory)


def test_a_tensor_in_two_shards(directory: Path) -> None:
    _shard(directory, lambda i: f"part-{i % 2}.safetensors")
    first = load_file(directory / "part-0.safetensors")
    second = load_file(directory / "part-1.safetensors")
    name = next(iter(first))
    save_file({**second, name: first[name]}, directory / "part-1.safetensors")
    with pytest.raises(Unsupported, match=f"tensor {name} is in part-0.safetensors as well"):
        _open(directory)


def test_random_weights_are_a_function_of_config_and_seed(directory: Path) -> None:
    config = read_config(directory)
    first, again, other = (RandomWeights(config, shapes_of(config), seed) for seed in (1, 1, 2))
    assert torch.equal(first.tensor(Q), again.tensor(Q))
    assert not torch.equal(first.tensor(Q), other.tensor(Q))
    assert first.digest == again.digest != other.digest
    assert len(first.digest) == 16
