"""Our model step alone: the runner, called with ready-made plans. No scheduler, mailbox or second process.

`python -m bench.drivers.bare MODEL THREADS NUM_BLOCKS`
"""

from __future__ import annotations

import random
import sys
import time
from itertools import count

from bench.serve import Op, prompt, serve
from bench.step_profile import Profiler
from diptych.domain.ids import BlockId, RequestId
from diptych.domain.plan import SequenceStep, StepPlan
from diptych.domain.ports import Runner
from diptych.domain.sampling import SamplingParams
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings

_CHUNK_TOKENS = 256
_NUM_WARM = 3


class Bare:
    """Plans as the worker's scheduler would make them; the KV before a decode is whatever the pool holds."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._seeds = count(1)
        self._greedy = SamplingParams(max_tokens=1 << 20, ignore_eos=True)

    def prefill(self, num_tokens: int) -> dict[str, float]:
        """A prompt in chunks of 256, as the worker runs it; seconds until its first token."""
        tokens = prompt(next(self._seeds), num_tokens, self._runner.vocab_size)
        table = self._tables(1, num_tokens)[0]
        begun = time.perf_counter()
        for start in range(0, num_tokens, _CHUNK_TOKENS):
            end = min(start + _CHUNK_TOKENS, num_tokens)
            sample = self._greedy if end == num_tokens else None
            self._runner.run(
                StepPlan((SequenceStep(RequestId("p"), tokens[start:end], start, (table,), sample),))
            )
        return {"seconds": time.perf_counter() - begun, "num_tokens": num_tokens}

    def decode(self, batch: int, context: int, num_steps: int, scattered: bool = False) -> dict[str, float]:
        """Steps of `batch` sequences from position `context` on; their blocks in a row, or all over the
        pool."""
        last = prompt(0, batch, self._runner.vocab_size)
        tables = self._tables(batch, context + _NUM_WARM + num_steps + 1)
        if scattered:
            places = list(range(self._runner.num_blocks[0]))
            random.Random(0).shuffle(places)
            tables = [[BlockId(places[block]) for block in table] for table in tables]
        begun = 0.0
        for number in range(_NUM_WARM + num_steps):
            if number == _NUM_WARM:
                begun = time.perf_counter()
            last = list(self._runner.run(self.plan(last, context + number, tables)).tokens)
        return {"seconds": time.perf_counter() - begun, "num_tokens": batch * num_steps}

    def profile(self, batch: int, context: int, num_steps: int) -> dict[str, object]:
        """Where a decode step's time goes; see `bench.step_profile`."""
        tables = self._tables(batch, context + 1)
        plan = self.plan(prompt(0, batch, self._runner.vocab_size), context, tables)
        return Profiler(lambda: self._runner.run(plan)).profile(num_steps)

    def profile_prefill(self, num_tokens: int, num_steps: int) -> dict[str, object]:
        """The same for the last chunk of a prompt."""
        table = self._tables(1, num_tokens)[0]
        start = max(0, num_tokens - _CHUNK_TOKENS)
        tokens = prompt(next(self._seeds), num_tokens - start, self._runner.vocab_size)
        plan = StepPlan((SequenceStep(RequestId("p"), tokens, start, (table,), self._greedy),))
        return Profiler(lambda: self._runner.run(plan)).profile(num_steps)

    def plan(self, last: list[int], start: int, tables: list[list[BlockId]]) -> StepPlan:
        """One decode step."""
        steps = (
            SequenceStep(RequestId(str(i)), [token], start, (tables[i],), self._greedy)
            for i, token in enumerate(last)
        )
        return StepPlan(tuple(steps))

    def _tables(self, batch: int, num_tokens: int) -> list[list[BlockId]]:
        each = -(-num_tokens // self._runner.block_tokens)
        return [[BlockId(i * each + j) for j in range(each)] for i in range(batch)]


def _open() -> tuple[dict[str, object], dict[str, Op]]:
    model, threads, num_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    begun = time.perf_counter()
    runner = open_runner(EngineSettings(model, threads=threads, num_blocks=num_blocks))
    bare = Bare(runner)
    ops: dict[str, Op] = {
        "prefill": bare.prefill, "decode": bare.decode, "profile": bare.profile,
        "profile_prefill": bare.profile_prefill,
    }  # fmt: skip
    return {"open_s": time.perf_counter() - begun}, ops


if __name__ == "__main__":
    serve(_open)
