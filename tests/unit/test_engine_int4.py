"""4-bit layers: the layout, the kernels that read it, and decode steps on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from diptych.domain.errors import InvalidField, Unsupported
from diptych.domain.layout import KvDtype
from diptych.domain.plan import StepPlan
from diptych.engine import forms, llama
from diptych.engine.config import read_config
from diptych.engine.int4 import can_shrink, grown, shrink
from diptych.engine.kernels.int4 import multiply, multiply_spread, sum_groups
from diptych.engine.runner import TorchRunner, _need, open_torch_runner
from diptych.engine.settings import EngineSettings, Profile, Weights
from diptych.engine.weights import LayerWeights, layer_weights
from tests.support.runner_driver import DrivenSequence, advance, decode, prefill, table
from tests.support.tiny_llama import write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def test_numbers_are_the_nearest() -> None:
    weight = torch.randn(48, 96)
    error = (grown(shrink(weight)) - weight).abs().view(48, 3, 32).amax(-1)
    grouped = weight.view(48, 3, 32)
    step = (grouped.amax(-1) - grouped.amin(-1)) / 15
    assert (error <= step * 0.6).all()  # a half, and what rounding scale and offset to bf16 adds


def test_weights_of_sixteen_levels_lose_nothing_but_rounding() -> None:
    """So are those of the default model's file, whose groups are ours."""
    levels = torch.randint(0, 16, (32, 64)).float()
    levels[:, ::32], levels[:, 1::32] = 0, 15
    weight = levels * 0.375 - 2.5
    assert torch.equal(grown(shrink(weight)), weight)


@pytest.mark.parametrize(("shape", "can"), [((16, 32), True), ((15, 32), False), ((16, 33), False)])
def test_only_whole_blocks_and_groups(shape: tuple[int, int], can: bool) -> None:
    assert can_shrink(*shape) is can


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("run", [multiply, multiply_spread])
def test_products(rows: int, run: object) -> None:
    matrix = shrink(torch.randn(48, 96))
    x = torch.zeros(12, 96)
    x[:rows] = torch.randn(rows, 96)
    sums, out = torch.empty(12, 3), torch.full((12, 48), torch.nan)
    sum_groups(x.data_ptr(), sums.data_ptr(), 12, 96)
    run(matrix.address, 48, 96, x.data_ptr(), sums.data_ptr(), out.data_ptr(), rows)  # type: ignore[operator]
    torch.testing.assert_close(out[:rows], x[:rows] @ grown(matrix).T, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("int4"), **SHAPE)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("qwen"), **SHAPE, architectures=["Qwen2ForCausalLM"], model_type="qwen2"
    )


def _open(directory: Path, weights: Weights, **changes: object) -> TorchRunner:
    settings = EngineSettings(
        str(directory), weights=weights, num_blocks=40, random_weights_seed=3, **changes  # type: ignore[arg-type]
    )  # fmt: skip
    return open_torch_runner(settings)


def _sequences(runner: TorchRunner, count: int) -> list[DrivenSequence]:
    """Prefilled, and a token further."""
    sequences = []
    for i in range(count):
        tokens = [(7 * i + 3 * j) % 300 for j in range(10 + 9 * i)]
        sequence = DrivenSequence(tokens, table(range(8 * i, 8 * i + 8)), str(i))
        prefill(runner, sequence)
        sequences.append(sequence)
    return sequences


def _through_int4(*arguments: Any) -> LayerWeights:
    """A layer whose matrices are what their 4-bit numbers stand for."""
    weights = layer_weights(*arguments)
    names = ("qkv", "out", "gate_up", "down")
    return replace(weights, **{name: grown(shrink(getattr(weights, name))).bfloat16() for name in names})


@pytest.mark.parametrize("model", ["directory", "biased"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_step_computes_what_the_model_of_these_weights_does(
    model: str, rows: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "layer_weights", _through_int4)
    runner = _open(request.getfixturevalue(model), Weights.INT4)
    sequences = _sequences(runner, rows)
    plan = StepPlan(tuple(sequence.step() for sequence in sequences))
    found = runner.logits(plan)
    runner._few_rows = None
    expected = runner.logits(plan)
    assert found is not None
    assert expected is not None
    assert not torch.equal(found, expected)
    assert (found - expected).std() < 0.06 * expected.std()


def test_two_threads_compute_what_one_does(directory: Path) -> None:
    logits = []
    for threads in (1, 2):
        runner = _open(directory, Weights.INT4, threads=threads)
        for layer in (*runner._pool.groups[0].keys, *runner._pool.groups[0].values):
            layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(1)))
        sequences = [DrivenSequence([5] * 21, table([i, i + 5]), str(i), computed=20) for i in range(3)]
        logits.append(runner.logits(StepPlan(tuple(sequence.step() for sequence in sequences))))
    torch.set_num_threads(1)
    torch.testing.assert_close(logits[0], logits[1], atol=0.05, rtol=0.05)  # the head is torch's


def test_auto_is_for_few_rows_and_decodes_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_AUTO_ROWS", 2)
    runner = _open(directory, Weights.AUTO)
    used: list[int] = []
    few = runner._few_rows
    assert few is not None
    logits = few.logits
    monkeypatch.setattr(type(few), "logits", lambda self, batch: used.append(batch.num_rows) or logits(batch))
    sequences = _sequences(runner, 3)
    assert used == []
    advance(runner, sequences[:2], [None, None])
    advance(runner, sequences, [None] * 3)
    other = DrivenSequence([1, 2, 3], table([39]), "prefill")
    advance(runner, [sequences[0], other], [None, None])
    decode(runner, sequences[0], 2)
    assert used == [2, 1, 1]


def test_demanded_where_they_cannot_be(tmp_path: Path) -> None:
    small = write_config(tmp_path)  # its heads are smaller than a vector
    assert _open(small, Weights.AUTO)._few_rows is None
    with pytest.raises(Unsupported, match="int4 weights need"):
        _open(small, Weights.INT4)
    with pytest.raises(InvalidField, match="weights: the exact profile has one format, is auto"):
        EngineSettings("toy", Profile.EXACT, weights=Weights.AUTO)


def test_their_memory_is_counted(directory: Path) -> None:
    config = read_config(directory)
    without, with_them = (
        _need(EngineSettings(str(directory)), config, KvDtype.BFLOAT16, has) for has in (False, True)
    )
    matrices = config.num_layers * (sum(config.qkv_sizes) * 64 + 192 * 64 + 192 * 64 + 64 * 96)
    assert with_them.weight_bytes - without.weight_bytes == matrices * 5 // 8
