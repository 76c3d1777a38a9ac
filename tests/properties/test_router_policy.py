"""What holds of the router's policy, whatever happens in whatever order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from diptych.domain.errors import Draining, Overloaded, PeerLost, TooLarge
from diptych.domain.ids import Cell, ChunkHash, Epoch, RequestId, WorkerId
from diptych.domain.records import Role, WorkerLoad, WorkerRecord
from services.router.decisions import (
    Abort,
    Arrival,
    Decision,
    Dial,
    End,
    HangUp,
    Limits,
    Place,
    Reason,
    WorkerRef,
)
from services.router.policy import RouterPolicy

LIMITS = Limits(
    model="toy",
    cell=Cell("main"),
    max_queue=3,
    max_wait_s=5.0,
    max_share=0.6,
    max_overcommit=1.5,
    output_reserve=20,
    prefix_slack=2,
    cancel_wait_s=1.0,
    max_moves=2,
    moves_per_s=4.0,
    move_burst=2,
    redial_min_s=0.1,
    redial_max_s=2.0,
)

NAMES = ["w0", "w1", "w2"]


class Policy(RuleBasedStateMachine):
    """The machine plays registry, sessions, workers and clients, and keeps its own books of who is where."""

    requests = Bundle("requests")

    @initialize()
    def start(self) -> None:
        self.policy = RouterPolicy(LIMITS)
        self.now = 0.0
        self.num_arrived = 0
        self.where: dict[RequestId, WorkerRef | None] = {}  # admitted and not ended; None: waiting
        self.cancelled: set[RequestId] = set()
        self.moves: dict[RequestId, int] = {}
        self.sessions: dict[WorkerRef, bool] = {}  # True: up
        self.listed: dict[WorkerRef, WorkerRecord] = {}
        self.epochs = dict.fromkeys(NAMES, 1)
        self.moved_at: list[float] = []
        self.retry_after_s = 1.0

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Dial(ref, record):
                    assert ref in self.listed, "dials who is not listed"
                    assert ref not in self.sessions, "dials who is dialled"
                    assert record == self.listed[ref]
                    self.sessions[ref] = False
                case HangUp(ref, _):
                    self.sessions.pop(ref, None)
                case Place(request_id, ref, moved):
                    assert self.sessions.get(ref), "placed on a worker without a session"
                    assert ref in self.listed, "placed on a worker that is not listed"
                    assert self.where[request_id] is None, "placed twice"
                    assert request_id not in self.cancelled
                    assert (moved is not None) == (self.moves.get(request_id, 0) > 0)
                    self.where[request_id] = ref
                    if moved:
                        self.moved_at.append(self.now)
                case Abort(request_id, ref):
                    assert self.where[request_id] == ref, "aborts on the wrong worker"
                case End(request_id, _):
                    del self.where[request_id]
                    self.cancelled.discard(request_id)

    def lose(self, ref: WorkerRef) -> None:
        for request_id, at in self.where.items():
            if at == ref and request_id not in self.cancelled:
                self.where[request_id] = None
                self.moves[request_id] = self.moves.get(request_id, 0) + 1

    @rule(
        present=st.lists(st.sampled_from(NAMES), unique=True),
        anew=st.sets(st.sampled_from(NAMES)),
        capacity=st.sampled_from([60, 200, 1000]),
        reported=st.integers(0, 5),
    )
    def registry(self, present: list[str], anew: set[str], capacity: int, reported: int) -> None:
        for name in anew:
            self.epochs[name] += 1
        before = self.listed
        self.listed = {}
        for name in present:
            ref = WorkerRef(WorkerId(name), Epoch(self.epochs[name]))
            self.listed[ref] = WorkerRecord(
                ref.worker_id, Role.DECODE, ref.epoch, Cell("main"), "toy", "", f"{ref}:1",
                capacity_tokens=before[ref].capacity_tokens if ref in before else capacity,
                load=WorkerLoad(num_running=reported),
            )  # fmt: skip
        for ref in {*self.sessions, *before}:
            if ref not in self.listed and any(ref.worker_id == other.worker_id for other in self.listed):
                self.lose(ref)
        self.carry_out(self.policy.set_workers(self.listed.values(), self.now))

    @rule(data=st.data())
    def session_up(self, data: st.DataObject) -> None:
        dialled = sorted(ref for ref, up in self.sessions.items() if not up)
        if dialled:
            ref = data.draw(st.sampled_from(dialled))
            self.sessions[ref] = True
            self.carry_out(self.policy.link_up(ref, self.now))

    @rule(data=st.data(), reason=st.sampled_from([Reason.WORKER_LOST, Reason.WORKER_SILENT]))
    def session_lost(self, data: st.DataObject, reason: Reason) -> None:
        if self.sessions:
            ref = data.draw(st.sampled_from(sorted(self.sessions)))
            del self.sessions[ref]
            self.lose(ref)
            self.carry_out(self.policy.link_lost(ref, reason, PeerLost("gone"), self.now))

    @rule(epoch=st.integers(-3, 0), name=st.sampled_from(NAMES))
    def a_stale_session_speaks(self, epoch: int, name: str) -> None:
        ref = WorkerRef(WorkerId(name), Epoch(self.epochs[name] + epoch - 1))
        if ref not in self.sessions and ref not in self.listed:
            assert self.policy.link_up(ref, self.now) == []
            decisions = self.policy.link_lost(ref, Reason.WORKER_LOST, PeerLost("late"), self.now)
            assert all(isinstance(decision, HangUp) for decision in decisions)

    @rule(
        target=requests,
        prompt=st.integers(1, 80),
        output=st.integers(1, 80),
        priority=st.integers(-1, 1),
        count=st.integers(1, 6),
        prefix=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3),
    )
    def arrive(self, prompt: int, output: int, priority: int, count: int, prefix: list[bytes]) -> object:
        admitted = []
        for _ in range(count):
            self.num_arrived += 1
            request_id = RequestId(f"r{self.num_arrived}")
            self.where[request_id] = None
            try:
                chunks = tuple(ChunkHash(chunk) for chunk in prefix)
                arrival = Arrival(request_id, prompt, output, priority, chunks)
                self.carry_out(self.policy.arrive(arrival, self.now))
            except Overloaded as error:
                self.retry_after_s = error.retry_after_s
                del self.where[request_id]
            except TooLarge:
                assert all(prompt + output > 0.6 * r.capacity_tokens for r in self.listed.values())
                del self.where[request_id]
            else:
                admitted.append(request_id)
        return multiple(*admitted)

    @rule(request_id=consumes(requests))
    def finish(self, request_id: RequestId) -> None:
        if self.where.get(request_id) is not None:
            del self.where[request_id]
            self.cancelled.discard(request_id)
            self.carry_out(self.policy.finish(request_id, self.now))

    @rule(request_id=requests)
    def cancel(self, request_id: RequestId) -> None:
        if self.where.get(request_id) is not None:
            self.cancelled.add(request_id)
        self.carry_out(self.policy.cancel(request_id, Reason.CLIENT_GONE, self.now))

    @rule(request_id=requests)
    def hand_back(self, request_id: RequestId) -> None:
        ref = self.where.get(request_id)
        if ref is None:
            return
        if request_id not in self.cancelled:
            self.where[request_id] = None
            self.moves[request_id] = self.moves.get(request_id, 0) + 1
        self.carry_out(self.policy.hand_back(request_id, ref, Draining("leaving"), self.now))

    @rule(seconds=st.sampled_from([0.05, 0.5, 3.0, 10.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.policy.tick(self.now))

    @invariant()
    def a_refusal_says_when_to_come_back(self) -> None:
        assert 0 < self.retry_after_s <= 30

    @invariant()
    def books_agree(self) -> None:
        self.policy.check_integrity()
        assert self.policy.num_live == len(self.where)
        assert all(self.policy.worker_of(request_id) == ref for request_id, ref in self.where.items())

    @invariant()
    def load_is_that_of_the_live_set(self) -> None:
        loads = self.policy.loads()
        for ref in {*self.sessions, *self.listed}:
            assert loads.of(ref).num_requests == sum(at == ref for at in self.where.values())

    @invariant()
    def nobody_is_where_nobody_serves(self) -> None:
        assert all(self.sessions.get(ref) for ref in self.where.values() if ref is not None)

    @invariant()
    def the_queue_is_bounded(self) -> None:
        new = [r for r, at in self.where.items() if at is None and not self.moves.get(r)]
        assert len(new) <= LIMITS.max_queue

    @invariant()
    def moves_are_bounded(self) -> None:
        assert all(self.moves.get(request_id, 0) <= LIMITS.max_moves for request_id in self.where)
        for start in self.moved_at[-20:]:
            within = sum(start <= at <= start + 1.0 for at in self.moved_at)
            assert within <= LIMITS.move_burst + LIMITS.moves_per_s

    def teardown(self) -> None:
        """Time alone ends every wait; workers end the rest; then nothing is left."""
        if not hasattr(self, "policy"):
            return
        self.policy.set_workers([], self.now)
        for request_id in [request_id for request_id, ref in self.where.items() if ref is not None]:
            self.policy.finish(request_id, self.now)
        self.policy.tick(self.now + 1000.0)
        self.policy.assert_empty()
        assert not self.policy.usable


Policy.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestPolicy = Policy.TestCase
