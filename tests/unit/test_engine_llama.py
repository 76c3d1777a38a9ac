"""Our forward pass against transformers' on small random models of every kind that is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from diptych.domain.plan import StepPlan
from diptych.engine import forms
from diptych.engine.runner import TorchRunner, open_torch_runner
from diptych.engine.settings import EngineSettings, Profile
from tests.support.runner_driver import DrivenSequence, advance, decode, prefill, table
from tests.support.tiny_llama import write_checkpoint

pytestmark = pytest.mark.engine

SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, head_dim=64, tie_word_embeddings=True),
    "llama untied": lambda: LlamaConfig(**SHAPE, rms_norm_eps=1e-3),
    "llama every head its own": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 6}),
    "llama3 rope": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "linear rope": lambda: LlamaConfig(**SHAPE, rope_parameters=LINEAR),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=8, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SHAPE, use_sliding_window=False),
}
PROMPT = [i * 37 % 99 for i in range(300)]


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A directory, and the oracle that wrote it."""
    return tmp_path, write_checkpoint(tmp_path, KINDS[request.param]())


def _open(directory: Path, profile: Profile = Profile.EXACT) -> TorchRunner:
    return open_torch_runner(EngineSettings(str(directory), profile, num_blocks=40))


def _last_logits(runner: TorchRunner, chunk: int) -> torch.Tensor:
    """Logits after PROMPT, prefilled in two pieces."""
    sequence = DrivenSequence(list(PROMPT), table(range(20)))
    advance(runner, [sequence], [chunk])
    logits = runner.logits(StepPlan((sequence.step(),)))
    assert logits is not None
    return logits


@torch.inference_mode()
def test_exact_logits_equal_the_oracle_s(model: tuple[Path, Any]) -> None:
    directory, oracle = model
    expected = oracle(torch.tensor([PROMPT])).logits[0, -1:]
    assert expected.std() > 0.5
    torch.testing.assert_close(_last_logits(_open(directory), 290), expected, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("lacks", ["nothing", "can_fuse", "can_pack"])
def test_fast_logits_are_near_the_oracle_s(
    model: tuple[Path, Any], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every form; an error in a formula would be as large as the logits."""
    if lacks != "nothing":
        monkeypatch.setattr(forms, lacks, lambda *_: False)
    directory, oracle = model
    expected = oracle(torch.tensor([PROMPT])).logits[0, -1:]
    for chunk in (1, 299):
        logits = _last_logits(_open(directory, Profile.FAST), chunk)
        assert (logits - expected).std() < 0.06 * expected.std()


@torch.inference_mode()
def test_greedy_decoding_in_a_batch_equals_the_oracle_s(model: tuple[Path, Any]) -> None:
    directory, oracle = model
    runner = _open(directory)
    sequences = [
        DrivenSequence(PROMPT[:n], table(range(4 * i, 4 * i + 4)), str(n)) for i, n in enumerate((1, 9, 40))
    ]
    for sequence in sequences:
        prefill(runner, sequence)
    for _ in range(9):
        advance(runner, sequences, [None] * 3)
    for sequence in sequences:
        num_prompt = len(sequence.tokens) - 10
        forced = oracle(torch.tensor([sequence.tokens])).logits[0].argmax(-1).tolist()
        assert sequence.output == forced[num_prompt - 1 : -1]


def test_shards_and_half_precision_load_as_well(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path / "whole", KINDS["llama"]())
    oracle.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    oracle.bfloat16().save_pretrained(tmp_path / "half")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards, half = (_last_logits(_open(tmp_path / name), 1) for name in ("whole", "shards", "half"))
    assert torch.equal(whole, shards)
    assert not torch.equal(whole, half)
    torch.testing.assert_close(whole, half, atol=0.1, rtol=0.1)


def test_both_profiles_read_one_model_but_write_different_kv(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, KINDS["llama"]())
    exact, fast = _open(tmp_path).layout, _open(tmp_path, Profile.FAST).layout
    assert exact.model_digest == fast.model_digest
    assert exact.fingerprint != fast.fingerprint


def test_broken_weights_fail_the_step_and_nothing_else(tmp_path: Path) -> None:
    """NaN in the pool's unused positions must not leak into other sequences' attention."""
    write_checkpoint(tmp_path, KINDS["llama"]())
    for profile in Profile:
        runner = _open(tmp_path, profile)
        before = DrivenSequence(PROMPT[:20], table([0, 1, 2]))
        prefill(runner, before)
        expected = list(decode(runner, before, 5))
        for layer in (*runner._pool.groups[0].keys, *runner._pool.groups[0].values):
            layer[: runner._pool.groups[0].null_slot] = torch.nan
        again = DrivenSequence(PROMPT[:20], table([0, 1, 2]))
        prefill(runner, again)
        assert decode(runner, again, 5) == expected
