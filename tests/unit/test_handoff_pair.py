"""The hand-off between the two engine loops: what it gives, and what is left after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.domain.fallbacks import Fallback
from diptych.domain.ids import RequestId
from diptych.domain.sampling import SamplingParams
from services.decode import messages as d
from services.prefill import messages as p
from tests.support.pair_rig import PairRig


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed + i * i % 31) % 256 for i in range(num_tokens)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def colocated(tokens: list[int], params: SamplingParams) -> list[int]:
    rig = PairRig(colocated=True)
    rig.submit("x", tokens, params)
    rig.pump()
    rig.assert_empty()
    rig.close()
    return rig.tokens["x"]


@pytest.fixture
def rig() -> Iterator[PairRig]:
    rig = PairRig()
    yield rig
    rig.close()


@pytest.mark.parametrize("length", [9, 255, 256, 257, 511, 512, 513, 700])
def test_disaggregated_equals_colocated(rig: PairRig, length: int) -> None:
    tokens = prompt(length)
    rig.submit("a", tokens, greedy(12))
    rig.pump()
    trail = rig.finishes["a"][0].trail
    assert rig.tokens["a"] == colocated(tokens, greedy(12))
    assert rig.indexes["a"] == list(range(12))
    assert (trail.path, trail.path_reason, trail.attempts) == ("disaggregated", "long_prompt", 1)
    assert trail.num_chunks == -(-length // 256)
    assert trail.kv_bytes == length * 8
    assert trail.fallbacks == {}
    rig.assert_empty()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_the_first_token_may_be_the_last(rig: PairRig, max_tokens: int) -> None:
    rig.submit("a", prompt(40), greedy(max_tokens))
    rig.pump()
    assert len(rig.tokens["a"]) == max_tokens
    assert [finish.reason for finish in rig.finishes["a"]] == ["length"]
    rig.assert_empty()


def test_a_first_token_that_stops_is_the_only_one(rig: PairRig) -> None:
    first = colocated(prompt(40), greedy(1))
    rig.submit("a", prompt(40), SamplingParams(max_tokens=9, stop_token_ids=(first[0],)))
    rig.pump()
    assert rig.tokens["a"] == first
    assert rig.finishes["a"][0].reason == "stop"
    rig.assert_empty()


def test_a_second_request_uses_what_the_first_left(rig: PairRig) -> None:
    tokens = prompt(600)
    for name in ("a", "b"):
        rig.submit(name, tokens, greedy(4))
        rig.pump()
    assert rig.tokens["a"] == rig.tokens["b"]
    assert rig.finishes["a"][0].trail.num_cached_tokens == 0
    trail = rig.finishes["b"][0].trail
    assert (trail.num_cached_tokens, trail.path, trail.path_reason) == (596, "local", "short_prompt")
    rig.assert_empty()


def test_many_at_once_equal_one_by_one() -> None:
    prompts = {f"r{i}": prompt(5 + 61 * i, i) for i in range(12)}
    expected = {name: colocated(tokens, greedy(20)) for name, tokens in prompts.items()}
    rig = PairRig(num_prefills=2, num_blocks=2000)
    for name, tokens in prompts.items():
        rig.submit(name, tokens, greedy(20))
    rig.pump()
    assert rig.tokens == expected
    rig.assert_empty()
    rig.close()


@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_corrupted_read_is_read_again(rig: PairRig, read: int) -> None:
    rig.faults.corrupt(read)
    rig.submit("a", prompt(700), greedy(8))
    rig.pump()
    assert rig.tokens["a"] == colocated(prompt(700), greedy(8))
    assert rig.finishes["a"][0].trail.attempts == 1
    rig.assert_empty()


def test_digests_that_stay_wrong_end_in_local_prefill(rig: PairRig) -> None:
    rig.faults.corrupt(0)  # each read
    rig.submit("a", prompt(300), greedy(8))
    rig.pump()
    assert rig.tokens["a"] == colocated(prompt(300), greedy(8))
    trail = rig.finishes["a"][0].trail
    assert (trail.path, trail.path_reason, trail.fallbacks) == (
        "local",
        "attempts_failed",
        {"digest_wrong": 2},
    )
    rig.assert_empty()


def test_what_landed_before_the_prefill_was_lost_is_kept(rig: PairRig) -> None:
    held: list[object] = []

    def hold_manifest(message: object) -> list[object]:
        if isinstance(message, p.ManifestReady) and not held:
            held.append(message)
            return []
        return [message]

    rig.transit = hold_manifest
    rig.submit("a", prompt(700), greedy(8))
    rig.pump(lambda: bool(held) and rig.decode.num_reads == 0)
    rig.pump()
    rig.fail_attempt("a", 1)
    rig.pump()
    assert rig.tokens["a"] == colocated(prompt(700), greedy(8))
    trail = rig.finishes["a"][0].trail
    assert (trail.path_reason, trail.fallbacks) == ("short_prompt", {"prefill_lost": 1})
    rig.assert_empty()


def test_nobody_claims_the_job(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    rig.submit("a", prompt(300), greedy(8))
    rig.pump()
    assert rig.tokens == {}
    rig.clock.now += 10.1
    rig.pump()
    assert rig.tokens["a"] == colocated(prompt(300), greedy(8))
    assert rig.finishes["a"][0].trail.fallbacks == {"begin_timeout": 1}
    assert not rig.jobs
    rig.assert_empty()


def test_the_last_prefill_worker_leaves_before_the_job_is_claimed(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    rig.submit("a", prompt(300), greedy(8))
    rig.pump()
    rig.tell(d.DecodeInbox(surroundings=[d.Surroundings(0, True)]))
    rig.pump()
    assert rig.tokens["a"] == colocated(prompt(300), greedy(8))
    assert rig.finishes["a"][0].trail.fallbacks == {"no_prefill_worker": 1}
    assert not rig.jobs
    rig.assert_empty()


def test_a_silent_prefill_is_given_up_and_changes_nothing_when_it_wakes(rig: PairRig) -> None:
    held: list[object] = []

    def stop_prefill(message: object) -> list[object]:
        if isinstance(message, p.ChunkAnnounced | p.ManifestReady) and message.key.attempt == 1:
            held.append(message)
            return []
        return [message]

    rig.transit = stop_prefill
    rig.submit("a", prompt(300), greedy(30))
    rig.pump()
    rig.clock.now += 3.1
    rig.pump(lambda: len(rig.tokens.get("a", [])) >= 2)
    rig.transit = lambda message: [message]
    for message in held:
        rig._from_prefill(message)
    rig.pump()
    assert rig.tokens["a"] == colocated(prompt(300), greedy(30))
    assert rig.finishes["a"][0].trail.fallbacks == {"prefill_stalled": 1}
    assert len(held) == 3
    assert rig.decode.load().counters["stale_message"] == len(held)
    rig.assert_empty()


def test_every_message_twice(rig: PairRig) -> None:
    rig.transit = lambda message: [message] if isinstance(message, d.TokensOut) else [message, message]
    rig.submit("a", prompt(700), greedy(8))
    rig.pump()
    assert rig.tokens["a"] == colocated(prompt(700), greedy(8))
    assert len(rig.finishes["a"]) == 1
    rig.assert_empty()


def test_only_the_first_begin_of_a_job_counts(rig: PairRig) -> None:
    """Another comes when the bus delivers the job twice, or when whoever claimed it was stopped and wakes."""
    jobs: list[d.JobPosted] = []

    def keep(message: object) -> list[object]:
        jobs.extend([message] if isinstance(message, d.JobPosted) else [])
        return [message]

    rig.transit = keep
    rig.faults.hold(1)
    rig.submit("a", prompt(700), greedy(8))
    rig.pump(lambda: rig.decode.num_reads > 0)
    rig.jobs.extend(jobs)
    rig.pump(lambda: rig.decode.load().counters.get("begin_refused", 0) == 1)
    rig.fail_attempt("a", 1)
    rig.pump(lambda: len(rig.attempts) == 2)
    rig.jobs.append(jobs[0])
    rig.faults.release()
    rig.pump()
    assert [key.attempt for _, key in rig.attempts] == [1, 2]
    assert rig.decode.load().counters["begin_refused"] == 2
    assert rig.tokens["a"] == colocated(prompt(700), greedy(8))
    assert rig.finishes["a"][0].trail.fallbacks == {"prefill_lost": 1}
    rig.assert_empty()


@pytest.mark.parametrize("reason", ["claim_stalled", "job_gone"])
def test_a_job_that_nobody_will_begin_is_posted_anew(rig: PairRig, reason: str) -> None:
    rig.takes_jobs = [False]
    rig.submit("a", prompt(700), greedy(8))
    rig.pump(lambda: bool(rig.jobs))
    late = rig.jobs[0]
    rig.tell(d.DecodeInbox(lost_jobs=[d.JobLost(RequestId("a"), Fallback(reason))]))
    rig.pump(lambda: len(rig.jobs) == 1 and rig.jobs[0] is not late)
    rig.takes_jobs = [True]
    rig.jobs.append(late)
    rig.pump()
    assert rig.tokens["a"] == colocated(prompt(700), greedy(8))
    assert rig.finishes["a"][0].trail.fallbacks == {reason: 1}
    assert rig.finishes["a"][0].trail.path == "disaggregated"
    assert rig.decode.load().counters["begin_refused"] == 1
    rig.assert_empty()


CANCEL_AT = {
    "queued": lambda rig: True,
    "posted": lambda rig: bool(rig.jobs),
    "begun": lambda rig: bool(rig.attempts),
    "reading": lambda rig: rig.decode.num_reads > 0,
    "between": lambda rig: rig.faults.num_reads >= 1 and rig.decode.num_reads == 0,
    "decoding": lambda rig: len(rig.tokens.get("a", [])) >= 1,
    "last step": lambda rig: len(rig.tokens.get("a", [])) >= 29,
}


@pytest.mark.parametrize("moment", CANCEL_AT)
def test_cancel_leaves_nothing_and_changes_nobody_else(rig: PairRig, moment: str) -> None:
    if moment == "posted":
        rig.takes_jobs = [False]
    if moment == "reading":
        rig.faults.hold(2)
    rig.submit("a", prompt(700), greedy(30))
    rig.pump(lambda: CANCEL_AT[moment](rig))
    rig.cancel("a")
    rig.submit("b", prompt(300, 5), greedy(10))
    rig.pump(lambda: bool(rig.finishes.get("a")))
    assert rig.finishes["a"][0].reason == "abort"
    rig.faults.release()
    rig.takes_jobs = [True]
    rig.pump()
    assert rig.tokens["b"] == colocated(prompt(300, 5), greedy(10))
    assert len(rig.finishes["a"]) == 1
    rig.assert_empty()


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    rig = PairRig(num_blocks=8)
    rig.submit("a", prompt(30), greedy(3))
    rig.pump()
    failure = rig.finishes["a"][0].failure
    assert failure is not None
    assert failure.kind == "TooLarge"
    assert "33 tokens" in failure.message
    rig.assert_empty()
    rig.close()
