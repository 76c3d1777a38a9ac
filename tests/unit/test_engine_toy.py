"""The toy: sensitive to every byte of KV, printable, slow on demand, and free of torch; and the engine's
memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diptych.domain.errors import Internal
from diptych.domain.ids import RequestId
from diptych.domain.plan import SequenceStep, StepPlan
from diptych.domain.sampling import SamplingParams
from diptych.engine.memory import allocate, digest
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings
from diptych.engine.toy import EOS, LAYOUT, VOCAB_SIZE, ToyRunner
from tests.support.runner_driver import GREEDY, DrivenSequence, decode, prefill, table

PROMPT = list(b"Hello, toy")


def _text(num_tokens: int, **sampling: float) -> list[int]:
    runner = ToyRunner(num_blocks=64, block_tokens=4)
    sample = SamplingParams(max_tokens=1, **sampling)  # type: ignore[arg-type]
    sequence = DrivenSequence(list(PROMPT), table(range(64)), sample=sample)
    prefill(runner, sequence)
    return decode(runner, sequence, num_tokens - 1)


def test_one_wrong_byte_of_kv_anywhere_changes_the_text() -> None:
    runner = ToyRunner(num_blocks=8)
    sequence = DrivenSequence(list(PROMPT), table(range(8)))
    prefill(runner, sequence)
    size = LAYOUT.chunk_bytes(len(PROMPT))
    chunk = allocate(size)
    runner.pack(sequence.tables, 0, len(PROMPT), chunk)
    right = decode(runner, DrivenSequence(list(sequence.tokens), sequence.tables, computed=len(PROMPT)), 8)
    for index in range(size):
        chunk.view()[index] ^= 1
        runner.unpack(chunk, sequence.tables, 0, len(PROMPT))
        chunk.view()[index] ^= 1
        wrong = decode(
            runner, DrivenSequence(list(sequence.tokens), sequence.tables, computed=len(PROMPT)), 8
        )
        assert wrong != right, f"byte {index}"


def test_output_is_text_with_smileys_and_ends_now_and_then() -> None:
    tokens = _text(240)
    text = bytes(token for token in tokens if token != EOS)
    assert any(ord(character) > 0xFFFF for character in text[: text.rfind(b"\xf0")].decode())
    assert 1 <= tokens.count(EOS) <= 12
    assert all(0 <= token < VOCAB_SIZE for token in tokens)


def test_temperature_mixes_in_the_seed() -> None:
    assert _text(20) == _text(20, seed=5)
    assert _text(20, temperature=1.0, seed=5) == _text(20, temperature=0.5, seed=5)
    assert _text(20, temperature=1.0, seed=5) != _text(20, temperature=1.0, seed=6)


def test_bans_hold_even_inside_a_smiley() -> None:
    runner = ToyRunner()
    tokens = list(b"abc\xf0")
    banned = (0x9F, *range(100, 200))
    step = SequenceStep(RequestId("r"), tokens, 0, table([0]), GREEDY, banned)
    assert runner.run(StepPlan((step,))).tokens[0] not in banned
    everything = SequenceStep(RequestId("r"), tokens, 0, table([0]), GREEDY, tuple(range(VOCAB_SIZE)))
    with pytest.raises(Internal, match="every token is banned"):
        runner.run(StepPlan((everything,)))


def test_a_step_takes_its_delay_in_pieces_and_stops_between_them() -> None:
    waits: list[float] = []
    runner = ToyRunner(step_delay_s=1.0, sleep=waits.append)
    plan = StepPlan((SequenceStep(RequestId("r"), PROMPT, 0, table(range(8)), GREEDY),))
    assert not runner.run(plan).aborted
    assert waits == [0.25] * 4
    waits.clear()
    assert runner.run(plan, stop=lambda: len(waits) == 2).aborted
    assert waits == [0.25] * 2


def test_an_aborted_step_leaves_garbage_behind() -> None:
    runner = ToyRunner()
    before, after = allocate(LAYOUT.chunk_bytes(4)), allocate(LAYOUT.chunk_bytes(4))
    plan = StepPlan((SequenceStep(RequestId("r"), PROMPT[:4], 0, table([0]), GREEDY),))
    runner.run(plan)
    runner.pack(table([0]), 0, 4, before)
    assert runner.run(plan, stop=lambda: True).aborted
    assert runner.pack(table([0]), 0, 4, after) != digest(before)


def test_settings_reach_the_toy() -> None:
    runner = open_runner(EngineSettings("toy", num_blocks=7, block_tokens=4, max_context=20))
    assert (runner.num_blocks, runner.block_tokens, runner.max_context) == ((7,), 4, 20)
    by_bytes = open_runner(EngineSettings("toy", memory_bytes=8 * 4 * 10, block_tokens=4))
    assert by_bytes.num_blocks == (10,)


def test_slow_settings_make_a_slow_toy() -> None:
    runner = open_runner(EngineSettings("toy", toy_step_delay_s=0.5))
    assert isinstance(runner, ToyRunner)
    assert runner._step_delay_s == 0.5


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000])
def test_memory_is_zeroed_writable_page_aligned_and_kept_by_its_span(num_bytes: int) -> None:
    span = allocate(num_bytes)
    assert span.address % 4096 == 0
    assert bytes(span.view()) == bytes(num_bytes)
    part = span.slice(num_bytes - 1, 1)
    del span
    part.view()[0] = 7
    assert part.view()[0] == 7


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_no_memory_of_no_size(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        allocate(num_bytes)


def test_the_toy_runs_without_torch() -> None:
    code = """
import sys
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings
open_runner(EngineSettings("toy"))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
