"""Every way in which the engine computes, against transformers in fp32: one suite, a tolerance for each.

The oracle has one contiguous sequence and no cache. Ours has pages in random order, prompts in any chunks
down to single tokens, and steps that mix prompts with decodes; after each piece its logits are compared. A
tolerance is a bound of the error's standard deviation as a share of the logits' own: an error in a formula,
a mask, a position or a block is as large as the logits. The models' matrices are such that 4 bits hold
them, so that one oracle judges all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config

pytest.importorskip("numba")

from diptych.domain.plan import StepPlan
from diptych.engine import forms, fused
from diptych.engine.int4 import grown, shrink
from diptych.engine.runner import TorchRunner, open_torch_runner
from diptych.engine.settings import EngineSettings, Profile, Weights
from tests.support.runner_driver import DrivenSequence, table
from tests.support.tiny_llama import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 160, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, use_sliding_window=False),
}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LONGEST = 300
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, LONGEST]
MOST_SEQUENCES = 6
BLOCKS_EACH = -(-LONGEST // 16)


@dataclass(frozen=True)
class Backend:
    """`lacks`: which abilities are denied it, as module and function."""

    profile: Profile
    tolerance: float
    lacks: tuple[tuple[Any, str], ...] = ()
    weights: Weights = Weights.BF16


BACKENDS = {
    "exact, packed": Backend(Profile.EXACT, 1e-5),
    "exact, plain": Backend(Profile.EXACT, 1e-5, ((forms, "can_pack"),)),
    "fast, best here": Backend(Profile.FAST, 0.05),
    "fast, vectors": Backend(Profile.FAST, 0.05, ((fused, "can_multiply"),)),
    "fast, torch": Backend(Profile.FAST, 0.05, ((forms, "can_fuse"),)),
    "fast, torch, plain": Backend(Profile.FAST, 0.05, ((forms, "can_fuse"), (forms, "can_pack"))),
    "fast, int4 decodes": Backend(Profile.FAST, 0.05, weights=Weights.INT4),
}
CASES = [
    (model, backend) for model in CONFIGS for backend in BACKENDS if model == "llama" or "best" in backend
]


@dataclass(frozen=True)
class Subject:
    """A runner, and the model that says what it should compute."""

    runner: TorchRunner
    tolerance: float
    oracle: Any

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """Logits [tokens, vocab]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.oracle(torch.tensor([tokens])).logits[0]
            return logits


def _write(directory: Path, name: str) -> Any:
    """The oracle, which wrote its weights to `directory`."""
    model = write_checkpoint(directory, CONFIGS[name]())
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if parameter.split(".")[-2] in MATRICES and tensor.ndim == 2:
                tensor.copy_(grown(shrink(tensor)))
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("backends")
    return {name: (root / name, _write(root / name, name)) for name in CONFIGS}


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def subject(request: pytest.FixtureRequest, oracles: dict[str, tuple[Path, Any]]) -> Subject:
    model, name = request.param
    directory, oracle = oracles[model]
    backend = BACKENDS[name]
    with pytest.MonkeyPatch.context() as patch:
        for module, ability in backend.lacks:
            patch.setattr(module, ability, lambda *_: False)
        runner = open_torch_runner(
            EngineSettings(
                str(directory), backend.profile, backend.weights, num_blocks=MOST_SEQUENCES * BLOCKS_EACH
            )
        )
    return Subject(runner, backend.tolerance, oracle)


@dataclass(frozen=True)
class Mix:
    """Sequences of these lengths, each run in pieces; `pieces` go round, so that steps are mixed."""

    lengths: tuple[int, ...]
    pieces: tuple[int, ...]
    seed: int


sizes = st.sampled_from(EDGES) | st.integers(1, LONGEST)
mixes = st.builds(
    Mix,
    lengths=st.lists(sizes, min_size=1, max_size=MOST_SEQUENCES).map(tuple),
    pieces=st.lists(st.sampled_from([1, 1, 16, 17, 100, 128, LONGEST]), min_size=1, max_size=7).map(tuple),
    seed=st.integers(0, 1 << 30),
)


def _sequences(mix: Mix) -> list[DrivenSequence]:
    """In pages of random order."""
    chance = random.Random(mix.seed)
    pages = list(range(MOST_SEQUENCES * BLOCKS_EACH))
    chance.shuffle(pages)
    return [
        DrivenSequence(
            chance.choices(range(SHAPE["vocab_size"]), k=length),
            table([pages.pop() for _ in range(BLOCKS_EACH)]),
            str(i),
        )
        for i, length in enumerate(mix.lengths)
    ]


def _check(subject: Subject, mix: Mix) -> None:
    sequences = _sequences(mix)
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    whole = {sequence.name: subject.expected(sequence.tokens) for sequence in sequences}
    num_pieces = 0
    while running := [sequence for sequence in sequences if sequence.computed < len(sequence.tokens)]:
        steps = []
        for sequence in running:
            start, size = sequence.computed, mix.pieces[num_pieces % len(mix.pieces)]
            num_pieces += 1
            end = min(start + size, len(sequence.tokens))
            known = DrivenSequence(sequence.tokens[:end], sequence.tables, sequence.name, computed=start)
            steps.append(known.step())
            expected.append(whole[sequence.name][end - 1])
            sequence.computed = end
        logits = subject.runner.logits(StepPlan(tuple(steps)))
        assert logits is not None
        found.append(logits)
    error = torch.cat(found) - torch.stack(expected)
    assert error.isfinite().all()
    spread = torch.stack(expected).std(-1)
    worst = (error.std(-1) / spread).max()
    assert worst <= subject.tolerance, f"error of {worst:.4f}"


@given(mix=mixes)
@example(mix=Mix((LONGEST,), (LONGEST,), 1))
@example(mix=Mix((40,), (1,), 2))
@example(mix=Mix((257, 33, 17, 16, 15, 1), (128,), 3))
@example(mix=Mix((60, 20, 9), (17, 1, 1, 1, 1, 1, 1), 4))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_logits(subject: Subject, mix: Mix) -> None:
    _check(subject, mix)


def test_decodes_of_many_at_once(subject: Subject) -> None:
    """Batches of every size: kernels are chosen by it."""
    for count in range(1, MOST_SEQUENCES + 1):
        _check(subject, Mix((18,) * count, (16,) * count + (1,) * count, count))


def test_a_foreign_page_is_an_error_that_no_tolerance_hides(subject: Subject) -> None:
    """The order of pages would be none: keys carry their positions."""
    ours, other = _sequences(Mix((40, 40), (1,), 5))
    subject.runner.run(StepPlan((ours.step(39), other.step(39))))
    first, (foreign, *_) = ours.tables[0][1:], other.tables[0]
    wrong = DrivenSequence(ours.tokens, table([foreign, *first]), computed=39)
    logits = subject.runner.logits(StepPlan((wrong.step(),)))
    assert logits is not None
    expected = subject.expected(ours.tokens)[39]
    assert (logits[0] - expected).std() / expected.std() > 2 * subject.tolerance
