"""Whatever happens between the engine loops, every request that is not cancelled ends with the text it would
have had alone, every cancelled one with a prefix of it, and nothing is left.

Small pools, so that requests get into each other's way; messages of hand-offs get lost, doubled and late,
reads fail and are corrupted, attempts break, time passes in leaps.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from diptych.domain.sampling import SamplingParams
from services.decode import messages as d
from services.prefill import messages as p
from tests.support.pair_rig import PairRig

CARRIED = (p.ChunkAnnounced, p.ManifestReady, d.ChunkDone, d.AttemptEnded, d.JobPosted)
"""Messages of hand-offs. What a broken stream loses, decode hears of: that is `break_attempt`."""


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 37 + 11 * i) % 256 for i in range(length)]


def params_of(seed: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=float(seed % 2), seed=seed, ignore_eos=True)


@cache
def alone(seed: int, length: int, num_tokens: int) -> tuple[int, ...]:
    rig = PairRig(colocated=True)
    rig.submit("x", prompt_of(seed, length), params_of(seed, num_tokens))
    rig.pump()
    rig.close()
    return tuple(rig.tokens["x"])


class HandoffMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(8, 14), slots=st.integers(1, 2), prefills=st.integers(1, 2))
    def start(self, blocks: int, slots: int, prefills: int) -> None:
        self.rig = PairRig(
            num_blocks=blocks, prefill_blocks=blocks, num_prefills=prefills, threshold=4,
            send_slots=slots, landing_slots=slots,
        )  # fmt: skip
        self.asked: dict[str, tuple[int, int, int]] = {}
        self.cancelled: set[str] = set()
        self.plan: list[str] = []
        self.late: list[object] = []
        self.rig.transit = self.carry

    def carry(self, message: object) -> list[object]:
        if not isinstance(message, CARRIED) or not self.plan:
            return [message]
        fate = self.plan.pop()
        if fate == "late":
            self.late.append(message)
        return {"lost": [], "late": [], "twice": [message, message]}[fate]

    @rule(seed=st.integers(0, 9), length=st.integers(1, 18), num_tokens=st.integers(1, 12))
    def submit(self, seed: int, length: int, num_tokens: int) -> None:
        name = f"r{len(self.asked)}"
        self.asked[name] = (seed, length, num_tokens)
        self.rig.submit(name, prompt_of(seed, length), params_of(seed, num_tokens))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.asked:
            name = data.draw(st.sampled_from(sorted(self.asked)))
            self.cancelled.add(name)
            self.rig.cancel(name)

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.rig.step()

    @rule(seconds=st.sampled_from([0.5, 3.1, 10.1, 31.0]))
    def leap(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule(fate=st.sampled_from(["lost", "late", "twice"]))
    def meddle(self, fate: str) -> None:
        self.plan.append(fate)

    @rule()
    def deliver_late(self) -> None:
        late, self.late = self.late, []
        for message in late:
            if isinstance(message, p.ChunkAnnounced | p.ManifestReady):
                self.rig._from_prefill(message)
            else:
                self.rig._from_decode(message)

    @rule(kind=st.sampled_from(["corrupt", "fail", "hold"]))
    def spoil_next_read(self, kind: str) -> None:
        getattr(self.rig.faults, kind)(self.rig.faults.num_reads + 1)

    @rule()
    def release_reads(self) -> None:
        self.rig.faults.release()

    @rule()
    def break_attempt(self) -> None:
        if self.rig.attempts:
            _, key = self.rig.attempts[-1]
            self.rig.fail_attempt(key.request_id, key.attempt)

    @rule(takes=st.booleans())
    def claim(self, takes: bool) -> None:
        self.rig.takes_jobs = [takes] * len(self.rig.prefills)

    @rule(num_prefills=st.integers(0, 1), available=st.booleans())
    def look_around(self, num_prefills: int, available: bool) -> None:
        self.rig.tell(d.DecodeInbox(surroundings=[d.Surroundings(num_prefills, available)]))

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.rig.decode.check_integrity()
            for name, tokens in self.rig.tokens.items():
                assert tuple(tokens) == alone(*self.asked[name])[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.plan, self.late = [], []
        self.rig.takes_jobs = [True] * len(self.rig.prefills)
        self.rig.faults.clear()
        self.rig.faults.release()
        for _ in range(30):
            self.rig.pump()
            if len(self.rig.finishes) == len(self.asked) and not self.rig.has_messages:
                break
            self.rig.clock.now += 31.0
        self.rig.clock.now += 31.0  # leases of chunks that nobody came for
        self.rig.pump()
        for name, asked in self.asked.items():
            (finish,) = self.rig.finishes[name]
            if name not in self.cancelled or finish.reason == "length":
                assert tuple(self.rig.tokens.get(name, ())) == alone(*asked)
        self.rig.assert_empty()
        self.rig.close()


HandoffMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHandoff = pytest.mark.timeout(300)(HandoffMachine.TestCase)
