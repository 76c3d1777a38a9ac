"""The engine against transformers, on the default model with its real weights, in fp32.

The oracle reads the same directory with its own code. Ids are compared by forcing: where the oracle's
highest logit after prompt and output so far is our next token at every step, its greedy continuation is
ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from diptych.domain.plan import StepPlan
from diptych.engine.catalog import DEFAULT, resolve
from diptych.engine.runner import TorchRunner, open_torch_runner
from diptych.engine.settings import EngineSettings, Profile
from tests.support.runner_driver import DrivenSequence, advance, decode, prefill, table

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

Oracle = Callable[[list[int]], torch.Tensor]
NEW_TOKENS = 16
LENGTHS = [1, 2, 3, 7, 15, 16, 17, 18, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 95, 96, 97, 128, 129]
LENGTHS += [5, 6, 255, 256, 257, *range(4, 64, 3)]
BLOCKS_EACH = 18


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve(DEFAULT).path


@pytest.fixture(scope="module")
def runner(directory: Path) -> TorchRunner:
    settings = EngineSettings(str(directory), Profile.EXACT, num_blocks=BLOCKS_EACH * len(LENGTHS))
    return open_torch_runner(settings)


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    """Logits [tokens, vocab] of a sequence, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return lambda tokens: model(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    """Pieces of prose and code of the given lengths, in ids of the real tokenizer."""
    root = Path(__file__).parents[2]
    text = (root / "LICENSE").read_text() + Path(__file__).read_text()
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    chance = random.Random(20)
    starts = [chance.randrange(len(ids) - length) for length in LENGTHS]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


def _sequences(prompts: list[list[int]]) -> list[DrivenSequence]:
    tables = (table(range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH)) for i in range(len(prompts)))
    return [DrivenSequence(list(prompt), blocks) for prompt, blocks in zip(prompts, tables, strict=True)]


@torch.inference_mode()
def test_greedy_ids_equal_transformers(runner: TorchRunner, oracle: Oracle, prompts: list[list[int]]) -> None:
    assert len(prompts) == 50
    sequences = _sequences(prompts)
    while unfinished := [sequence for sequence in sequences if len(sequence.output) < NEW_TOKENS]:
        advance(runner, unfinished, [128] * len(unfinished))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert len(sequence.output) == NEW_TOKENS
        logits = oracle(sequence.tokens)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == sequence.output, f"prompt of {len(prompt)}"


@torch.inference_mode()
def test_logits_are_close_to_transformers(
    runner: TorchRunner, oracle: Oracle, prompts: list[list[int]]
) -> None:
    """Equal ids could hide an error that happens to change no argmax."""
    sequence = _sequences(prompts)[LENGTHS.index(257)]
    logits = runner.logits(StepPlan((sequence.step(),)))
    expected = oracle(sequence.tokens)[-1:]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_logits_of_real_weights_do_not_depend_on_chunks_or_batch(
    runner: TorchRunner, prompts: list[list[int]]
) -> None:
    sequences = _sequences(prompts)
    long, others = sequences[LENGTHS.index(257)], sequences[:20]
    whole = runner.logits(StepPlan((long.step(),)))
    assert whole is not None
    for other in others:
        prefill(runner, other)
    advance(runner, [*others, long], [None] * 20 + [100])
    advance(runner, [long], [156])
    chunked = runner.logits(StepPlan((*(other.step() for other in others), long.step())))
    assert chunked is not None
    assert torch.equal(chunked[-1], whole[0])


def test_the_fast_profile_continues_sensibly(directory: Path) -> None:
    """bf16 promises no ids; but on a question with one answer it finds it."""
    fast = open_torch_runner(EngineSettings(str(directory), Profile.FAST, num_blocks=8))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    sequence = DrivenSequence(tokenizer.encode(text).ids, table(range(8)))
    prefill(fast, sequence)
    assert "Paris" in tokenizer.decode(decode(fast, sequence, 10))
