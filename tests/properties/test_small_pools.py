"""A pool that is too small for what runs in it: a thousand seeded interleavings of two to four requests.

Pools of seven or eight blocks; requests come, are cancelled, lose their prefill, and wait for time; loops,
rings and channel are real. Whatever the order, every request ends with the text that it has alone, the
oldest is never preempted, and nothing is left.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from diptych.domain.plan import SequenceStep, StepPlan
from diptych.domain.sampling import SamplingParams
from diptych.engine.toy import ToyRunner
from services.decode import messages as d
from tests.support.pair_rig import PairRig

NUM_SEEDS = 1000
BATCH = 50
LONGEST = 31
"""Positions of the largest request: with the next token's, it fills the pool of eight blocks."""


@cache
def alone(seed: int, num_prompt: int, num_output: int) -> list[int]:
    """What a request of its own says: drawn token by token from a runner that nobody shares."""
    runner = ToyRunner(num_blocks=20, block_tokens=4)
    tokens, start = prompt_of(seed, num_prompt), 0
    for _ in range(num_output):
        step = SequenceStep("x", tokens[start:], start, (range(20),), params_of(seed, num_output))  # type: ignore[arg-type]
        start = len(tokens)
        tokens = [*tokens, *runner.run(StepPlan((step,))).tokens]
    return tokens[num_prompt:]


def prompt_of(seed: int, num_prompt: int) -> list[int]:
    return [(seed * 37 + 11 * i) % 256 for i in range(num_prompt)]


def params_of(seed: int, num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, temperature=float(seed % 2), seed=seed, ignore_eos=True)


class Interleaving:
    """One seed: what is asked, in which order, and what goes wrong meanwhile."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.num_blocks = self.chance.choice((7, 8))
        self.rig = PairRig(
            num_blocks=self.num_blocks, prefill_blocks=8, threshold=self.chance.choice((0, 6, 100)),
            send_slots=self.chance.choice((1, 2)), landing_slots=self.chance.choice((1, 2)),
            max_batch=self.chance.choice((2, 64)), colocated=self.chance.random() < 0.2,
        )  # fmt: skip
        self.asked: dict[str, tuple[int, int, int]] = {}
        self.cancelled: set[str] = set()
        self.num_preempted = 0

    def run(self) -> None:
        for i in range(self.chance.randint(2, 4)):
            self._ask(f"r{i}")
            for _ in range(self.chance.randint(0, 12)):
                self._turn()
                self._meddle()
        self._rest()
        for name, (seed, num_prompt, num_output) in self.asked.items():
            (finish,) = self.rig.finishes[name]
            expected = alone(seed, num_prompt, num_output)
            tokens = self.rig.tokens.get(name, [])
            if num_prompt + num_output > 4 * self.num_blocks:
                assert finish.failure is not None
                assert finish.failure.kind == "TooLarge"
            elif name in self.cancelled:
                assert tokens == expected[: len(tokens)]
            else:
                assert (finish.reason, tokens) == ("length", expected)
            self.num_preempted += finish.trail.num_preempted
        self.rig.assert_empty()
        self.rig.close()

    def _ask(self, name: str) -> None:
        num_prompt = self.chance.randint(1, 20)
        num_output = self.chance.randint(1, LONGEST - num_prompt)
        if self.chance.random() < 0.03:
            num_output += LONGEST
        seed = self.chance.randint(0, 9)
        self.asked[name] = (seed, num_prompt, num_output)
        priority = self.chance.choice((0, 0, 0, -1, 2))
        self.rig.submit(name, prompt_of(seed, num_prompt), params_of(seed, num_output), priority=priority)

    def _turn(self) -> None:
        active = self.rig.decode._scheduler._seats.active
        oldest = min(active, key=lambda r: r.arrival, default=None)
        self.rig.step()
        self.rig.decode.check_integrity()
        if oldest is not None:
            ended = oldest.request_id in self.rig.finishes or oldest.request_id in self.cancelled
            older = any(request.arrival < oldest.arrival for request in active)
            assert ended or oldest in active or older, "the oldest was preempted"

    def _meddle(self) -> None:
        match self.chance.randrange(24):
            case 0:
                name = self.chance.choice(sorted(self.asked))
                self.cancelled.add(name)
                self.rig.cancel(name)
            case 1 if self.rig.attempts:
                key = self.rig.attempts[-1][1]
                self.rig.fail_attempt(key.request_id, key.attempt)
            case 2:
                self.rig.clock.now += self.chance.choice((0.5, 3.1, 10.1, 31.0))
            case 3:
                self.rig.takes_jobs = [self.chance.random() < 0.5]
            case 4:
                available = self.chance.random() < 0.5
                self.rig.tell(d.DecodeInbox(surroundings=[d.Surroundings(1, available)]))
            case 5:
                self.rig.faults.corrupt(self.rig.faults.num_reads + 1)

    def _rest(self) -> None:
        self.rig.takes_jobs = [True]
        for _ in range(30):
            self.rig.pump()
            if len(self.rig.finishes) == len(self.asked):
                break
            self.rig.clock.now += 31.0
        self.rig.clock.now += 31.0  # leases of chunks that nobody came for
        self.rig.pump()


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_interleavings(first: int) -> None:
    num_preempted = 0
    for seed in range(first, first + BATCH):
        interleaving = Interleaving(seed)
        try:
            interleaving.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        num_preempted += interleaving.num_preempted
    assert num_preempted > 5, "these pools were not too small"
