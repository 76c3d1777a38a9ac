"""The exact profile's promise, to the bit: logits and KV depend on the tokens before and on nothing else.

Whatever the chunks, the block size, the blocks, and whoever else is in the batch, the result equals that of
one whole, lonely prefill.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.domain.plan import StepPlan
from diptych.engine.exact_attention import CONTEXT_TILE, QUERY_TILE
from diptych.engine.memory import allocate
from diptych.engine.runner import TorchRunner, open_torch_runner
from diptych.engine.settings import EngineSettings, Profile
from tests.support.runner_driver import DrivenSequence, advance, table
from tests.support.tiny_llama import REAL_SHAPES, write_config

pytestmark = pytest.mark.engine

LONGEST = 600
BLOCK_SIZES = (1, 4, 16, 20)
EDGES = [1, 2, 3, 4, 5, 15, 16, 17, 19, 20, 21, 31, 32, 33, 255, 256, 257, 271, 272, 273, 511, 512, 513, 600]


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random models: one tiny, one of the default model's shapes with few layers and a small vocabulary."""
    changes = {"tiny": {}, "real-shapes": REAL_SHAPES}
    root = tmp_path_factory.mktemp("exact")
    return {name: str(write_config(root / name, **fields)) for name, fields in changes.items()}


@functools.cache
def _opened(directory: str, block_tokens: int) -> TorchRunner:
    num_blocks = 3 * LONGEST // block_tokens + 10
    return open_torch_runner(
        EngineSettings(
            directory,
            Profile.EXACT,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            random_weights_seed=5,
        )
    )


@dataclass(frozen=True)
class Story:
    """How a prompt of `length` tokens is run: in `chunks`, beside others that prefill or decode meanwhile."""

    length: int
    chunks: tuple[int, ...]
    block_tokens: int
    others: tuple[int, ...]
    """Length of each other sequence's prompt."""
    seed: int


lengths = st.sampled_from(EDGES) | st.integers(1, LONGEST)
stories = st.builds(
    Story,
    length=lengths,
    chunks=st.lists(st.sampled_from(EDGES) | st.integers(1, 300), min_size=1, max_size=6).map(tuple),
    block_tokens=st.sampled_from(BLOCK_SIZES),
    others=st.lists(st.integers(1, 40), max_size=20).map(tuple),
    seed=st.integers(0, 1 << 32),
)


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(320), k=length)


def _tables(runner: TorchRunner, needs: list[int], seed: int) -> list[list[int]]:
    """Disjoint tables in random order, for sequences of these lengths."""
    free = list(range(runner.num_blocks[0]))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-need // runner.block_tokens))] for need in needs]


def _kv(runner: TorchRunner, sequence: DrivenSequence, length: int) -> bytes:
    chunk = allocate(runner.layout.chunk_bytes(length))
    runner.pack(sequence.tables, 0, length, chunk)
    return bytes(chunk.view())


def _alone(directory: str, story: Story) -> tuple[torch.Tensor, bytes]:
    """Logits and KV of the whole prompt in one piece, in blocks of 16."""
    runner = _opened(directory, 16)
    sequence = DrivenSequence(_prompt(story.length, story.seed), table(range(-(-story.length // 16))))
    logits = runner.logits(StepPlan((sequence.step(),)))
    assert logits is not None
    return logits[0], _kv(runner, sequence, story.length)


def _in_company(directory: str, story: Story) -> tuple[torch.Tensor, bytes]:
    """The same by the story."""
    runner = _opened(directory, story.block_tokens)
    steps = len(story.chunks) + story.length
    blocks = _tables(runner, [story.length, *(length + 10 for length in story.others)], story.seed)
    sequence = DrivenSequence(_prompt(story.length, story.seed), table(blocks[0]), "observed")
    others = [
        DrivenSequence(_prompt(length, story.seed + i + 1), table(blocks[i + 1]), f"other {i}")
        for i, length in enumerate(story.others)
    ]
    for i in range(steps):
        beside = [other for other in others if len(other.output) < 10]
        left = story.length - sequence.computed
        chunk = story.chunks[i] if i < len(story.chunks) else left
        if chunk >= left:
            plan = StepPlan((*(other.step() for other in beside), sequence.step()))
            logits = runner.logits(plan)
            assert logits is not None
            return logits[-1], _kv(runner, sequence, story.length)
        advance(runner, [*beside, sequence], [None] * len(beside) + [chunk])
    raise AssertionError("the chunks never reached the end")


def _check(directory: str, story: Story) -> None:
    logits, kv = _alone(directory, story)
    other_logits, other_kv = _in_company(directory, story)
    assert torch.equal(logits, other_logits)
    assert kv == other_kv


@given(story=stories)
@example(story=Story(257, (256, 1), 16, (), 1))
@example(story=Story(33, (1,) * 32, 4, (5, 1), 2))
@settings(max_examples=60)
def test_tiny_model(directories: dict[str, str], story: Story) -> None:
    _check(directories["tiny"], story)


@given(story=stories)
@example(story=Story(300, (17, 100, 1, 1), 16, (3,) * 17, 1))
@settings(max_examples=12)
def test_real_shapes(directories: dict[str, str], story: Story) -> None:
    """BLAS picks its kernels by shape: so also on the shapes that are served."""
    _check(directories["real-shapes"], story)


def test_query_tiles_never_straddle_context_tiles() -> None:
    assert CONTEXT_TILE % QUERY_TILE == 0
