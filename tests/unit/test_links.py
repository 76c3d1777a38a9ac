"""The latency guard: what is measured when, and which links may not be used."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from diptych.domain.fallbacks import Fallback
from diptych.domain.ids import Cell, Epoch, RequestId, WorkerId
from diptych.domain.ports import KvChannel, Region
from diptych.domain.records import ChannelEndpoint, Role, WorkerLoad, WorkerRecord
from diptych.domain.sampling import SamplingParams
from diptych.engine.memory import allocate
from diptych.transfer.faults import Faults
from diptych.transfer.memory import MemoryFabric
from services.decode import messages as d
from services.decode.link_watch import INTERVAL_S, LOST_S, RETRY_S, LinkWatch
from services.decode.links import LARGE_EVERY, MAX_TOLD, LinkBook, LinkBound, Way
from services.decode.messages import ProbeAsked, ProbeDone
from services.decode.probes import NUM_SMALL, Probes
from tests.support.pair_rig import PairRig

NEAR: Way = (WorkerId("near"), Epoch(1), "grpc")
FAR: Way = (WorkerId("far"), Epoch(2), "grpc")
RDMA_S = 50e-6
DEADLINE_S = 20.0


def book(max_rtt_s: float = RDMA_S, *, enforced: bool = True) -> LinkBook:
    links = LinkBook(LinkBound(max_rtt_s, enforced))
    links.keep([NEAR, FAR], 0.0)
    return links


# The book.


def test_a_link_past_the_bound_is_refused_one_within_is_not() -> None:
    links = book()
    links.measured(NEAR, [90e-6, 50e-6], 0.0, 1.0)
    links.measured(FAR, [51e-6, 90e-6], 0.0, 1.0)
    assert not links.refuses(NEAR)
    assert links.refuses(FAR)


@pytest.mark.parametrize(("max_rtt_s", "enforced"), [(RDMA_S, False), (0.0, True), (0.0, False)])
def test_without_a_bound_or_without_being_told_nothing_is_refused(max_rtt_s: float, enforced: bool) -> None:
    links = book(max_rtt_s, enforced=enforced)
    links.measured(FAR, [1.0], 0.0, 1.0)
    assert not links.refuses(FAR)
    assert links.is_too_slow(FAR) == (max_rtt_s > 0)
    [far, near] = links.links(3.0)
    assert (far.worker_id, far.rtt_s, far.age_s, far.used) == ("far", 1.0, 2.0, True)
    assert (near.rtt_s, near.age_s, near.too_slow) == (0.0, 0.0, False)


def test_what_was_never_measured_is_not_too_slow() -> None:
    links = book(1e-9)
    links.measured(FAR, [], 0.0, 1.0)
    assert not links.refuses(FAR)
    assert not links.refuses((WorkerId("unheard of"), Epoch(3), "grpc"))


def test_one_bad_moment_condemns_no_link_and_a_lasting_one_does() -> None:
    links = book()
    for now, rtt_s, refused in ((1, 40e-6, False), (2, 45e-6, False), (3, 9.0, False), (4, 8.0, True)):
        links.measured(NEAR, [rtt_s], 0.0, float(now))
        assert links.refuses(NEAR) is refused
    for now in (5, 6):
        links.measured(NEAR, [40e-6], 0.0, float(now))
    assert not links.refuses(NEAR)


def test_a_peer_that_is_gone_is_forgotten_and_a_new_start_is_a_new_peer() -> None:
    links = book()
    links.measured(FAR, [1.0], 5.0, 1.0)
    links.keep([(FAR[0], Epoch(9), "grpc")], 2.0)
    assert [(link.epoch, link.rtt_s, link.bytes_per_s) for link in links.links(2.0)] == [(9, 0.0, 0.0)]
    links.measured(FAR, [1.0], 0.0, 3.0)  # what was asked before
    assert not links.refuses(FAR)


def test_whoever_has_waited_longest_is_next() -> None:
    links = book()
    links.asked(NEAR, 5.0)
    links.asked(FAR, 3.0)
    assert links.due([NEAR, FAR], 2.9) is None
    assert links.due([NEAR, FAR], 9.0) == FAR
    assert links.due([NEAR], 9.0) == NEAR
    assert links.due([], 9.0) is None


def test_the_bandwidth_is_measured_at_first_and_seldom_then() -> None:
    links = book()
    large = [links.asked(NEAR, 0.0) for _ in range(LARGE_EVERY + 1)]
    assert [number for number, is_large in enumerate(large) if is_large] == [0, LARGE_EVERY]
    links.measured(NEAR, [1e-6], 7.0, 1.0)
    links.measured(NEAR, [1e-6], 0.0, 2.0)
    assert links.links(2.0)[0].bytes_per_s == 7.0


def test_a_round_that_was_put_off_counts_as_never_asked() -> None:
    links = book()
    assert links.asked(NEAR, 10.0)
    links.put_off(NEAR, 1.0)
    assert links.due([NEAR], 1.0) == NEAR
    assert links.asked(NEAR, 10.0)


# When the I/O process asks.


class Peers:
    """Two prefill workers and a clock."""

    def __init__(self, **endpoint: object) -> None:
        self.now = 100.0
        self.kinds = ["grpc"]
        self.load = WorkerLoad()
        self.endpoint = ChannelEndpoint("grpc", "127.0.0.1:9", 1, "ab" * 16, 4096)
        self.watch = LinkWatch(LinkBound(RDMA_S, True), self, lambda: self.kinds, lambda: self.now)

    def __call__(self) -> list[WorkerRecord]:
        return [
            WorkerRecord(
                *(name, Role.PREFILL, epoch, Cell("main"), "toy", "f", "127.0.0.1:8"),
                channels=(self.endpoint,), load=self.load,
            )
            for name, epoch, _ in (NEAR, FAR)
        ]  # fmt: skip


def test_each_peer_is_measured_in_turn_and_not_again_at_once() -> None:
    peers = Peers()
    first = peers.watch.ask()
    assert first is not None
    assert first.region == Region("grpc", "127.0.0.1:9", b"\xab" * 16, 4096)
    assert peers.watch.ask() is None, "one round at a time"
    peers.watch.measured(ProbeDone(first.worker_id, first.epoch, [30e-6], channel="grpc"))
    second = peers.watch.ask()
    assert second is not None
    assert {first.worker_id, second.worker_id} == {"near", "far"}
    peers.watch.measured(ProbeDone(second.worker_id, second.epoch, [60e-6], channel="grpc"))
    assert peers.watch.ask() is None
    assert peers.watch.refuses((second.worker_id, second.epoch))
    peers.now += 1.3 * INTERVAL_S
    assert peers.watch.ask() is not None


def test_a_registration_tells_a_few_links_and_the_fastest_among_them() -> None:
    """Routers go by it: the slowest alone would make every worker of a large cell look cut off."""
    peers, names = Peers(), [(WorkerId(f"p{number:02}"), Epoch(1), "grpc") for number in range(MAX_TOLD + 4)]
    peers.watch._book.keep(names, 0.0)
    for number, name in enumerate(names):
        peers.watch._book.measured(name, [(number + 1) * 10e-6], 0.0, 1.0)
    told = peers.watch.told()
    assert [link.worker_id for link in told] == [
        *(f"p{number:02}" for number in range(MAX_TOLD + 3, 4, -1)), "p00",
    ]  # fmt: skip
    assert [link.too_slow for link in told] == [True] * (MAX_TOLD - 1) + [False]


def test_a_busy_peer_is_left_alone() -> None:
    peers = Peers()
    peers.load = WorkerLoad(num_running=1)
    assert peers.watch.ask() is None
    peers.load = WorkerLoad()
    assert peers.watch.ask() is not None


@pytest.mark.parametrize(("key", "num_bytes"), [("", 64), ("no hex", 64), ("abcd", 0), ("abcd", -1)])
def test_a_peer_without_a_probe_region_is_not_read(key: str, num_bytes: int) -> None:
    peers = Peers()
    peers.endpoint = ChannelEndpoint("grpc", "127.0.0.1:9", 1, key, num_bytes)
    assert peers.watch.ask() is None
    assert len(peers.watch.links()) == 2, "it is shown"
    peers.watch.measured(ProbeDone(NEAR[0], NEAR[1], [1.0], channel="nixl"))
    peers.endpoint = ChannelEndpoint("nixl", "127.0.0.1:9", 1, "ab", 64)
    assert peers.watch.ask() is None, "another channel's region"


def test_no_time_means_soon_again_and_a_failure_is_counted() -> None:
    peers = Peers()
    asked = peers.watch.ask()
    assert asked is not None
    peers.watch.measured(ProbeDone(asked.worker_id, asked.epoch, channel="grpc"))
    peers.now += RETRY_S
    other = peers.watch.ask()
    assert other is not None
    peers.watch.measured(ProbeDone(other.worker_id, other.epoch, error="gone", channel="grpc"))
    again = peers.watch.ask()
    assert again is not None
    assert again.worker_id == asked.worker_id
    assert peers.watch.counters == {"probe_failed": 1}


def test_an_answer_that_never_comes_is_given_up() -> None:
    peers = Peers()
    assert peers.watch.ask() is not None
    peers.now += LOST_S
    assert peers.watch.ask() is not None


# What the engine does.


class Reading:
    """A probe region, and the engine's side of reading it."""

    def __init__(self) -> None:
        fabric = MemoryFabric()
        self.faults = Faults()
        self.source: KvChannel = fabric.open()
        self.channel = fabric.open(faults=self.faults)
        self.region = self.source.register(allocate(4096))
        self.woken = threading.Event()
        self.probes = Probes(self.channel, self.woken.set)

    def finish(self) -> list[ProbeDone]:
        while not (done := self.probes.turn(busy=False)):
            assert self.woken.wait(DEADLINE_S), "no read ended"
            self.woken.clear()
        return done

    def close(self) -> None:
        self.channel.close()
        self.source.close()


@pytest.fixture
def reading() -> Iterator[Reading]:
    reading = Reading()
    yield reading
    reading.close()


@pytest.mark.parametrize("large", [True, False])
def test_a_round_reads_small_pieces_and_perhaps_a_large_one(reading: Reading, large: bool) -> None:
    reading.probes.ask(ProbeAsked(*NEAR[:2], reading.region, large))
    [done] = reading.finish()
    assert (done.worker_id, done.epoch, done.error) == (*NEAR[:2], "")
    assert len(done.rtts) == NUM_SMALL
    assert all(rtt_s > 0 for rtt_s in done.rtts)
    assert (done.bytes_per_s > 0) is large
    assert reading.faults.num_reads == NUM_SMALL + large
    assert reading.probes.idle
    assert reading.probes.turn(busy=False) == []


def test_work_ends_a_round_with_what_there_is(reading: Reading) -> None:
    reading.probes.ask(ProbeAsked(*NEAR[:2], reading.region))
    assert reading.probes.turn(busy=True) == [ProbeDone(*NEAR[:2], channel="memory")]
    assert reading.faults.num_reads == 0
    reading.probes.ask(ProbeAsked(*NEAR[:2], reading.region))
    assert reading.probes.turn(busy=False) == []
    assert reading.woken.wait(DEADLINE_S)
    [done] = reading.probes.turn(busy=True)
    assert (len(done.rtts), done.error) == (1, "")


def test_a_second_question_meanwhile_is_put_off(reading: Reading) -> None:
    reading.faults.hold(1)
    reading.probes.ask(ProbeAsked(*NEAR[:2], reading.region))
    assert reading.probes.turn(busy=False) == []
    reading.probes.ask(ProbeAsked(*FAR[:2], reading.region))
    assert reading.probes.turn(busy=False) == [ProbeDone(*FAR[:2], channel="memory")]
    reading.faults.release()
    assert [done.worker_id for done in reading.finish()] == ["near"]


def test_a_read_that_fails_ends_the_round(reading: Reading) -> None:
    reading.faults.fail(2)
    reading.probes.ask(ProbeAsked(*NEAR[:2], reading.region))
    [done] = reading.finish()
    assert len(done.rtts) == 1
    assert done.error


def test_a_region_that_cannot_be_read_is_an_error_not_a_crash(reading: Reading) -> None:
    reading.probes.ask(ProbeAsked(*NEAR[:2], Region("grpc", "127.0.0.1:9", b"k", 64)))
    [done] = reading.probes.turn(busy=False)
    assert "grpc" in done.error


# What the brain makes of it.


@pytest.fixture
def rig() -> Iterator[PairRig]:
    rig = PairRig()
    yield rig
    rig.close()


def submit(rig: PairRig) -> None:
    rig.submit("a", list(range(200)), SamplingParams(max_tokens=3, ignore_eos=True))


def test_where_all_links_are_too_slow_prompts_are_prefilled_locally(rig: PairRig) -> None:
    rig.tell(d.DecodeInbox(surroundings=[d.Surroundings(0, True, num_too_slow=2)]))
    submit(rig)
    rig.pump()
    trail = rig.finishes["a"][0].trail
    assert (trail.path, trail.path_reason) == ("local", "link_too_slow")
    assert trail.fallbacks == {"link_too_slow": 1}
    assert rig.decode.load().counters["link_too_slow"] == 1
    rig.assert_empty()


def test_a_job_that_waits_when_the_last_link_becomes_too_slow_is_taken_back(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    submit(rig)
    rig.pump(lambda: bool(rig.jobs))
    rig.tell(d.DecodeInbox(surroundings=[d.Surroundings(0, True, num_too_slow=1)]))
    rig.pump()
    assert rig.finishes["a"][0].trail.fallbacks[Fallback.LINK_TOO_SLOW] >= 1
    assert not rig.jobs
    rig.assert_empty()


def begin(rig: PairRig, ticket: int, *, too_slow: bool) -> None:
    job = rig.jobs.popleft()
    asked = d.BeginAsked(ticket, job.request_id, WorkerId("far"), rig.prefills[0].fingerprint, too_slow)
    rig.tell(d.DecodeInbox(begins=[asked]))


def test_a_begin_over_a_slow_link_is_refused_and_another_worker_gets_the_job(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    submit(rig)
    rig.pump(lambda: bool(rig.jobs))
    answers: list[d.BeginAnswer] = []

    def transit(message: object) -> list[object]:
        if isinstance(message, d.BeginAnswer) and message.ticket == 99:
            answers.append(message)
            return []
        return [message]

    rig.transit = transit
    begin(rig, 99, too_slow=True)
    rig.pump(lambda: bool(answers))
    assert answers[0].refusal is not None
    assert "the link to far is past its bound" in answers[0].refusal.message
    rig.takes_jobs = [True]
    rig.pump()
    trail = rig.finishes["a"][0].trail
    assert (trail.path, trail.prefill_worker, trail.attempts) == ("disaggregated", "prefill-0", 1)
    assert trail.fallbacks == {"link_too_slow": 1}
    rig.assert_empty()


def test_a_second_refusal_ends_in_a_local_prefill(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    rig.transit = lambda message: [] if isinstance(message, d.BeginAnswer) else [message]
    submit(rig)
    for ticket in (97, 98):
        rig.pump(lambda: bool(rig.jobs))
        begin(rig, ticket, too_slow=True)
    rig.pump()
    trail = rig.finishes["a"][0].trail
    assert (trail.path, trail.fallbacks) == ("local", {"link_too_slow": 2})
    rig.assert_empty()


def test_a_refused_begin_leaves_an_attempt_of_somebody_else_alone(rig: PairRig) -> None:
    submit(rig)
    rig.faults.hold(1)
    while not rig.decode.num_unfinished_reads:
        rig.step()
    rig.transit = lambda m: [] if isinstance(m, d.BeginAnswer) and m.ticket == 99 else [m]
    asked = d.BeginAsked(99, RequestId("a"), WorkerId("far"), rig.prefills[0].fingerprint, True)
    rig.tell(d.DecodeInbox(begins=[asked]))
    rig.step()
    rig.faults.release()
    rig.pump()
    trail = rig.finishes["a"][0].trail
    assert (trail.path, trail.attempts, trail.fallbacks) == ("disaggregated", 1, {})
    rig.assert_empty()
