"""The prefill brain's promises, under random loads: everything ends, budgets hold, short prompts are not
behind all of a long one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.domain.blocks import BlockPool
from diptych.domain.holding import KvPools
from diptych.domain.ids import CHUNK_TOKENS, Attempt, BlockHash, RequestId
from diptych.domain.plan import NOT_SAMPLED, StepOutcome
from diptych.domain.sampling import SamplingParams
from diptych.domain.slots import SlotRing
from services.prefill.admission import PrefillSettings
from services.prefill.messages import AttemptKey, AttemptOver, Begun, Released, Stopped
from services.prefill.scheduler import PrefillScheduler
from services.prefill.sources import DECODE, SourceKey, Sources

BLOCK_TOKENS = 4


@dataclass
class PrefillSim:
    """A prefill brain whose chunks are read at random moments, and whose steps cost nothing."""

    num_blocks: int
    num_slots: int = 4
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.now = 0.0
        self.pools = KvPools([BlockPool(self.num_blocks, BLOCK_TOKENS)])
        ring: SlotRing[SourceKey] = SlotRing(self.num_slots, 100)
        landing: SlotRing[AttemptKey] = SlotRing(1, 100)
        settings = PrefillSettings("f", 100_000, offer_chunks=False)
        self.brain = PrefillScheduler(self.pools, Sources(ring, 30.0), landing, settings)
        self.unread: list[Released] = []
        self.over: list[AttemptOver] = []
        self.steps: list[dict[str, int]] = []
        self.first_tokens: list[str] = []

    def begin(self, name: str, num_tokens: int, num_held: int = 0, priority: int = 0) -> None:
        seed = sum(name.encode()) * 7919
        tokens = [(seed + 31 * i) % 256 for i in range(num_tokens)]
        key = AttemptKey(RequestId(name), Attempt(1))
        root = BlockHash(name.encode().ljust(16))
        self.brain.begin(
            Begun(key, tokens, SamplingParams(max_tokens=1), [], num_held, root, priority), self.now
        )

    def stop(self, name: str) -> None:
        self.brain.stop(Stopped(AttemptKey(RequestId(name), Attempt(1))))

    def turn(self, reads: bool = True) -> None:
        plan = self.brain.plan(self.now)
        assert plan.num_tokens <= CHUNK_TOKENS
        for step in plan.steps:
            assert step.start // CHUNK_TOKENS == (step.start + len(step.tokens) - 1) // CHUNK_TOKENS
        if plan.steps:
            self.steps.append({step.request_id: len(step.tokens) for step in plan.steps})
            drawn = [65 if step.sample is not None else NOT_SAMPLED for step in plan.steps]
            self.first_tokens += [step.request_id for step in plan.steps if step.sample is not None]
            self.brain.commit(plan, StepOutcome(drawn), self.now)
        while (pack := self.brain.next_pack(self.now)) is not None:
            self.brain.packed(pack)
            self.unread.append(Released(pack.key, pack.index, DECODE))
        while reads and self.unread and self.chance.random() < 0.7:
            self.brain.released(self.unread.pop(self.chance.randrange(len(self.unread))))
        effects = self.brain.take_effects()
        self.over += effects.over
        holdings = [job.holding for job in self.brain.jobs.values() if job.holding is not None]
        self.pools.check_integrity(holdings)
        self.now += 0.01

    def rest(self) -> None:
        for _ in range(5000):
            if not self.brain.jobs:
                self.over += self.brain.take_effects().over
                self.pools.drop_cache()
                self.brain.assert_empty()
                return
            self.turn()
        raise AssertionError(f"never ended: {list(self.brain.jobs)}")


@dataclass(frozen=True)
class Job:
    """An attempt that begins `turns` turns after the one before."""

    num_tokens: int
    num_held: int
    priority: int
    turns: int


jobs = st.lists(
    st.builds(
        Job,
        num_tokens=st.integers(1, 300) | st.integers(1, 1100),
        num_held=st.integers(0, 40),
        priority=st.integers(-2, 2),
        turns=st.integers(0, 5),
    ),
    min_size=1,
    max_size=10,
)


@given(load=jobs, num_slots=st.integers(1, 4), num_blocks=st.integers(80, 400), seed=st.integers(0, 99))
@settings(max_examples=120)
def test_every_attempt_ends(load: list[Job], num_slots: int, num_blocks: int, seed: int) -> None:
    sim = PrefillSim(num_blocks, num_slots, random.Random(seed))
    for i, job in enumerate(load):
        sim.begin(f"r{i}", job.num_tokens, min(job.num_held, job.num_tokens - 1), job.priority)
        for _ in range(job.turns):
            sim.turn(reads=sim.chance.random() < 0.5)
        if sim.chance.random() < 0.2:
            sim.stop(f"r{sim.chance.randint(0, i)}")
            sim.unread = [read for read in sim.unread if read.key in sim.brain.jobs]
    sim.rest()
    assert len(sim.over) == len(load)
    for over in sim.over:
        too_large = load[int(over.key.request_id[1:])].num_tokens > BLOCK_TOKENS * num_blocks
        assert (over.failure is not None) == too_large


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one() -> None:
    sim = PrefillSim(3000)
    sim.begin("long", 40 * CHUNK_TOKENS)
    for _ in range(3):
        sim.turn()
    sim.begin("short", 40)
    sim.turn()
    sim.turn()
    assert sim.first_tokens == ["short"]
    sim.rest()


def test_a_stream_of_short_prompts_leaves_half_of_the_turns_to_a_long_one() -> None:
    sim = PrefillSim(3000, num_slots=64)
    sim.begin("long", 10 * CHUNK_TOKENS)
    for i in range(100):
        sim.begin(f"short{i}", CHUNK_TOKENS)
        sim.turn()
        if "long" in sim.first_tokens:
            break
    assert 18 <= len(sim.steps) <= 20
    sim.rest()


def test_attempts_start_by_priority_when_blocks_are_short() -> None:
    sim = PrefillSim(30)
    sim.begin("first", 100)
    sim.turn(reads=False)
    for name, priority in (("late", 1), ("second", 0), ("urgent", -1)):
        sim.begin(name, 100, priority=priority)
    sim.rest()
    assert sim.first_tokens == ["first", "urgent", "second", "late"]
