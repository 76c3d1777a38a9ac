"""What both engines say that they hold, in each part of a request's life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.domain.audit import MAX_OF_A_KIND, Held
from diptych.domain.sampling import SamplingParams
from services.prefill import messages as p
from tests.support.pair_rig import PairRig

PROMPT = [(7 * i + i * i % 31) % 256 for i in range(600)]


@pytest.fixture
def rig() -> Iterator[PairRig]:
    rig = PairRig()
    yield rig
    rig.close()


def kinds(held: list[Held]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in held:
        found.setdefault(one.kind, []).append(one.name)
    return found


def submit(rig: PairRig, name: str = "a") -> None:
    rig.submit(name, PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))


def test_nothing_is_held_before_and_after(rig: PairRig) -> None:
    assert (rig.decode.load().held, rig.decode.load().num_held) == ([], 0)
    submit(rig)
    rig.pump()
    assert (rig.decode.load().held, rig.decode.load().num_held) == ([], 0)
    assert rig.prefills[0]._load().held == []


def test_a_job_that_waits_tells_its_age_and_its_end(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    submit(rig)
    rig.pump(lambda: bool(rig.jobs))
    rig.clock.now += 4.0
    request, job = rig.decode.load().held
    assert (request.kind, request.name, request.age_s) == ("request", "a", 4.0)
    assert request.num_blocks == 151
    assert job == Held("job", "a", "bus", 4.0, 0, 6.0)
    rig.cancel("a")
    rig.pump()


def test_an_attempt_and_its_reads_belong_to_the_prefill_worker(rig: PairRig) -> None:
    submit(rig)
    rig.faults.hold(1)
    while not rig.decode.num_unfinished_reads:
        rig.step()
    load = rig.decode.load()
    found = {one.kind: one for one in load.held}
    assert load.num_held == len(load.held) == 3
    assert (found["attempt"].name, found["attempt"].owner) == ("a/1", "prefill-0")
    assert (found["read"].name, found["read"].owner) == ("a/1 chunk 0", "prefill-0")
    assert found["read"].ends_in_s == 5.0
    sent = kinds(rig.prefills[0]._load().held)
    assert "a/1 chunk 0" in sent["chunk"]
    rig.cancel("a")
    rig.pump(lambda: not rig.decode.load().num_held or bool(rig.decode.num_unfinished_reads))
    rig.faults.release()
    rig.wait_for_reads()
    rig.pump()
    rig.assert_empty()


def test_a_chunk_names_its_readers_and_its_lease(rig: PairRig) -> None:
    lost = (p.ChunkAnnounced, p.ManifestReady)
    rig.transit = lambda message: [] if isinstance(message, lost) else [message]
    submit(rig)
    rig.pump()
    rig.clock.now += 1.0
    chunks = [one for one in rig.prefills[0]._load().held if one.kind == "chunk"]
    assert [one.name for one in chunks] == ["a/1 chunk 0", "a/1 chunk 1", "a/1 chunk 2"]
    assert {(one.owner, one.age_s, one.ends_in_s) for one in chunks} == {("decode", 1.0, 29.0)}
    rig.transit = lambda message: [message]
    rig.cancel("a")
    rig.pump()
    rig.assert_empty()


def test_the_list_is_bounded_and_the_oldest_come_first(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    for number in range(2 * MAX_OF_A_KIND):
        submit(rig, f"r{number}")
    rig.step()
    load = rig.decode.load()
    requests = kinds(load.held)["request"]
    assert requests == [f"r{number}" for number in range(MAX_OF_A_KIND)]
    assert load.num_held >= 2 * MAX_OF_A_KIND
    for number in range(2 * MAX_OF_A_KIND):
        rig.cancel(f"r{number}")
    rig.pump()
    rig.assert_empty()
