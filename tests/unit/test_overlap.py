"""A chunk travels while the next one is computed, and what of its way was not hidden is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.domain.plan import StepPlan
from diptych.domain.sampling import SamplingParams
from services.prefill.messages import ManifestReady
from tests.support.pair_rig import PairRig

NUM_TOKENS = 700
"""Three chunks of 256 tokens, the last one short."""


@pytest.fixture
def rig() -> Iterator[PairRig]:
    rig = PairRig(token_us=1000)
    yield rig
    rig.close()


def submit(rig: PairRig) -> None:
    rig.submit("a", [i % 200 for i in range(NUM_TOKENS)], SamplingParams(max_tokens=1, ignore_eos=True))


def test_a_chunk_is_read_before_the_next_one_is_computed(rig: PairRig) -> None:
    reads_before: list[int] = []

    def on_step(name: str, plan: StepPlan) -> None:
        if name == "prefill":
            reads_before.append(rig.faults.num_reads)

    rig.on_step = on_step
    submit(rig)
    rig.pump()
    assert len(reads_before) == 3
    assert reads_before[0] == 0
    assert reads_before[-1] >= 1, "nothing was read until everything was computed"
    trail = rig.finishes["a"][0].trail
    assert (trail.path, trail.num_chunks) == ("disaggregated", 3)
    rig.assert_empty()


def test_only_what_no_computing_hid_is_exposed(rig: PairRig) -> None:
    def slow_manifest(message: object) -> list[object]:
        rig.clock.now += 0.5 * isinstance(message, ManifestReady)
        return [message]

    rig.transit = slow_manifest
    submit(rig)
    rig.faults.hold(3)
    rig.pump(lambda: rig.faults.num_reads == 3)
    rig.wait_for_reads(1)
    rig.step()
    rig.clock.now += 0.25
    rig.faults.release()
    rig.pump()
    trail = rig.finishes["a"][0].trail
    assert trail.exposed_s == pytest.approx(0.75)
    assert trail.handoff_s >= trail.exposed_s
    rig.assert_empty()
