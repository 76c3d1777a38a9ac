"""What every `Runner` must do, run on each of them: the toy, and a small Llama in both profiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from diptych.domain.errors import Internal
from diptych.domain.ids import BlockId, RequestId
from diptych.domain.plan import NOT_SAMPLED, SequenceStep, StepPlan
from diptych.domain.ports import Runner
from diptych.domain.sampling import SamplingParams
from diptych.engine.memory import allocate
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings, Profile
from tests.support.runner_driver import GREEDY, DrivenSequence, advance, decode, prefill, table
from tests.support.tiny_llama import write_config

Open = Callable[..., Runner]
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33]
BLOCKS = [9, 2, 14, 5, 11, 3]
INVARIANT = ["toy", pytest.param("exact", marks=pytest.mark.engine)]
"""Kinds whose output depends on neither chunking nor batching; `fast` promises no such thing."""
FREE = [pytest.param(kind, marks=pytest.mark.engine) for kind in ("fast", "fused")]
"""`fused` is `fast` on a model that the compiled kernels serve."""


@functools.cache
def _opened(kind: str, path: str, block_tokens: int) -> Runner:
    profile = Profile.EXACT if kind == "exact" else Profile.FAST
    seed = None if kind == "toy" else 7
    return open_runner(
        EngineSettings(path, profile, num_blocks=16, block_tokens=block_tokens, random_weights_seed=seed)
    )


@pytest.fixture(params=[*INVARIANT, *FREE])
def open_(request: pytest.FixtureRequest) -> Open:
    """Opens a runner of the kind under test; calls with equal arguments share one."""
    kind: str = request.param
    if kind == "toy":
        return functools.partial(_opened, kind, "toy")
    return functools.partial(_opened, kind, str(request.getfixturevalue("directories")[kind == "fused"]))


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose heads are smaller than a vector, and one whose heads are not."""
    root = tmp_path_factory.mktemp("tiny-llama")
    return write_config(root / "small"), write_config(root / "whole", head_dim=32)


@pytest.fixture
def runner(open_: Open) -> Runner:
    return open_(4)


def _sequence(blocks: list[int], **changes: object) -> DrivenSequence:
    return DrivenSequence(tokens=list(PROMPT), tables=table(blocks), **changes)  # type: ignore[arg-type]


def test_it_describes_itself(runner: Runner) -> None:
    assert runner.block_tokens == 4
    assert runner.num_blocks == (16,)
    assert len(runner.num_blocks) == len(runner.layout.groups)
    assert runner.vocab_size > 256
    assert runner.max_context >= 64
    assert len(runner.layout.model_digest) == 16


def test_equal_runs_draw_equal_tokens_from_any_blocks(runner: Runner) -> None:
    first, second = _sequence(BLOCKS), _sequence([0, 1, 4, 6, 7, 8])
    prefill(runner, first)
    prefill(runner, second)
    assert decode(runner, first, 8) == decode(runner, second, 8)
    assert all(0 <= token < runner.vocab_size for token in first.output)


def test_output_depends_on_every_token_before(runner: Runner) -> None:
    """A runner that ignored its KV would pass everything else here."""
    whole, cut = _sequence(BLOCKS), _sequence(BLOCKS)
    prefill(runner, whole)
    decode(runner, whole, 8)
    cut.tokens[0] += 1
    prefill(runner, cut)
    assert decode(runner, cut, 8) != whole.output


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
@pytest.mark.parametrize("open_", INVARIANT, indirect=True)
def test_chunked_prefill_equals_whole(runner: Runner, chunk: int) -> None:
    whole, chunked = _sequence(BLOCKS), _sequence([0, 1, 4, 6, 7, 8])
    prefill(runner, whole)
    decode(runner, whole, 8)
    prefill(runner, chunked, chunk)
    assert decode(runner, chunked, 8) == whole.output


@pytest.mark.parametrize("open_", INVARIANT, indirect=True)
def test_a_mixed_batch_equals_each_alone(runner: Runner) -> None:
    alone, other = _sequence([0, 1, 4, 6, 7, 8]), _sequence(BLOCKS)
    other.tokens.reverse()
    for sequence in (alone, other):
        prefill(runner, sequence)
        decode(runner, sequence, 5)
    first, second = _sequence([0, 1, 4, 6, 7, 8], name="a"), _sequence(BLOCKS, name="b")
    second.tokens.reverse()
    prefill(runner, first)
    for chunk in (5, 7, None, None, None):
        advance(runner, [first, second], [None, chunk])
    decode(runner, second, 3)
    assert first.output == alone.output
    assert second.output == other.output


@pytest.mark.parametrize("other_block_tokens", [3, 4, 16])
def test_packed_kv_continues_on_another_runner(open_: Open, other_block_tokens: int) -> None:
    here, there = open_(4), open_(other_block_tokens)
    sequence = _sequence(BLOCKS)
    prefill(here, sequence)
    moved = DrivenSequence(
        tokens=list(sequence.tokens),
        tables=table([7, 1, 12, 0, 13, 4, 10, 8]),
        computed=sequence.computed,
        output=list(sequence.output),
    )
    for start, num_tokens in ((0, 5), (5, 8)):
        chunk = allocate(here.layout.chunk_bytes(num_tokens))
        digest = here.pack(sequence.tables, start, num_tokens, chunk)
        assert digest == there.digest(chunk)
        there.unpack(chunk, moved.tables, start, num_tokens)
    assert decode(there, moved, 8) == decode(here, sequence, 8)


def test_one_flipped_bit_changes_the_digest(runner: Runner) -> None:
    sequence = _sequence(BLOCKS)
    prefill(runner, sequence)
    chunk = allocate(runner.layout.chunk_bytes(13))
    digest = runner.pack(sequence.tables, 0, 13, chunk)
    assert digest == xxhash.xxh3_128(bytes(chunk.view())).digest()
    assert len(digest) == 16
    chunk.view()[-1] ^= 1
    assert runner.digest(chunk) != digest


def test_unpack_writes_its_positions_and_no_others(runner: Runner) -> None:
    sequence = _sequence(BLOCKS)
    prefill(runner, sequence)
    whole = allocate(runner.layout.chunk_bytes(13))
    runner.pack(sequence.tables, 0, 13, whole)
    before = bytes(whole.view())
    part = allocate(runner.layout.chunk_bytes(3))
    runner.pack(sequence.tables, 5, 3, part)
    runner.unpack(part, sequence.tables, 5, 3)
    runner.pack(sequence.tables, 0, 13, whole)
    assert bytes(whole.view()) == before


@pytest.mark.parametrize("excess", [-1, 1])
def test_a_chunk_of_another_size_is_refused(runner: Runner, excess: int) -> None:
    chunk = allocate(runner.layout.chunk_bytes(4) + excess)
    with pytest.raises(ValueError, match="4 tokens are"):
        runner.pack(table(BLOCKS), 0, 4, chunk)
    with pytest.raises(ValueError, match="4 tokens are"):
        runner.unpack(chunk, table(BLOCKS), 0, 4)


def test_chunks_outside_of_their_tables_are_refused(runner: Runner) -> None:
    chunk = allocate(runner.layout.chunk_bytes(5))
    with pytest.raises(Internal, match="need 2"):
        runner.pack(table([3]), 0, 5, chunk)
    with pytest.raises(Internal, match="block outside"):
        runner.unpack(chunk, table([3, 16]), 0, 5)


@pytest.mark.parametrize("polls", [0, 1, 2])
def test_abort_between_layers_draws_nothing_and_harms_nobody(runner: Runner, polls: int) -> None:
    sequence, bystander = _sequence(BLOCKS), _sequence([0, 1, 4, 6, 7, 8], name="bystander")
    prefill(runner, bystander)
    asked = iter([False] * polls + [True])
    outcome = runner.run(StepPlan((sequence.step(),)), stop=lambda: next(asked))
    assert outcome.aborted
    assert list(outcome.tokens) == [NOT_SAMPLED]
    prefill(runner, sequence)
    assert decode(runner, bystander, 5) == decode(runner, sequence, 5)


def test_a_stop_that_never_comes_changes_nothing(runner: Runner) -> None:
    sequence = _sequence(BLOCKS)
    outcome = runner.run(StepPlan((sequence.step(),)), stop=lambda: False)
    assert not outcome.aborted
    prefill(runner, sequence)
    assert list(outcome.tokens) == sequence.output


def test_only_rows_that_ask_are_sampled(runner: Runner) -> None:
    first, second = _sequence(BLOCKS, name="a"), _sequence([0, 1, 4, 6], name="b")
    outcome = advance(runner, [first, second], [5, None])
    assert outcome.tokens[0] == NOT_SAMPLED
    assert 0 <= outcome.tokens[1] < runner.vocab_size


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_banned_ids_are_never_drawn(runner: Runner, temperature: float) -> None:
    banned: tuple[int, ...] = ()
    sample = SamplingParams(max_tokens=1, temperature=temperature, seed=3)
    for _ in range(6):
        step = SequenceStep(RequestId("r"), PROMPT, 0, table(BLOCKS), sample, banned)
        token = runner.run(StepPlan((step,))).tokens[0]
        assert token not in banned
        banned += (token,)


def test_seeds_decide_when_the_temperature_is_high(runner: Runner) -> None:
    outputs = []
    for seed in (1, 2, 1):
        sample = SamplingParams(max_tokens=1, temperature=50.0, seed=seed)
        sequence = _sequence(BLOCKS, sample=sample)
        prefill(runner, sequence)
        outputs.append(decode(runner, sequence, 6))
    assert outputs[0] == outputs[2]
    assert outputs[0] != outputs[1]


def test_an_empty_plan_is_a_step(runner: Runner) -> None:
    assert list(runner.run(StepPlan(())).tokens) == []


def test_plans_that_would_spoil_the_pool_are_refused(runner: Runner) -> None:
    good = SequenceStep(RequestId("good"), PROMPT, 0, table(BLOCKS), GREEDY)
    far = runner.max_context
    bad = {
        "written twice": (good, SequenceStep(RequestId("b"), [1], 5, table([0, 2]), None)),
        "need 4": (SequenceStep(RequestId("b"), PROMPT, 0, table(BLOCKS[:3]), None),),
        "block outside": (SequenceStep(RequestId("b"), PROMPT, 0, table([16, 1, 2, 3]), None),),
        "0 tokens": (SequenceStep(RequestId("b"), [], 4, table(BLOCKS), None),),
        "from position -1": (SequenceStep(RequestId("b"), [1], -1, table(BLOCKS), None),),
        "token id": (SequenceStep(RequestId("b"), [runner.vocab_size], 0, table(BLOCKS), None),),
        "the context holds": (SequenceStep(RequestId("b"), [1], far, table(BLOCKS), None),),
        "2 block tables": (SequenceStep(RequestId("b"), [1], 0, ((BlockId(0),), (BlockId(0),)), None),),
    }
    for message, steps in bad.items():
        with pytest.raises(Internal, match=message):
            runner.run(StepPlan(steps))
