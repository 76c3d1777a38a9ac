"""What a prefill engine takes in between the layers of a step: aborts, and questions of how it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from diptych.domain.hashing import cache_root
from diptych.domain.ids import Attempt, RequestId
from diptych.domain.plan import StepOutcome
from diptych.domain.sampling import SamplingParams
from diptych.engine.settings import EngineSettings
from diptych.engine.toy import LAYOUT, ToyRunner
from diptych.transfer.memory import MemoryFabric
from diptych.worker.channel import ChannelSettings
from services.prefill.loop import LoopSettings, PrefillLoop
from services.prefill.messages import AttemptKey, Begun, PrefillInbox, PrefillOutbox, Stopped

GREEDY = SamplingParams(max_tokens=1)
TAIL, HEAD = AttemptKey(RequestId("tail"), Attempt(1)), AttemptKey(RequestId("head"), Attempt(1))
LAST = AttemptKey(RequestId("last"), Attempt(1))


class Post:
    """`between` holds what comes at each look between layers, `inboxes` what lies there at a turn's start."""

    def __init__(self) -> None:
        self.inboxes: list[PrefillInbox] = []
        self.between: list[list[PrefillInbox]] = []
        self.outboxes: list[PrefillOutbox] = []
        self.in_step = False

    def receive(self, timeout_s: float) -> Sequence[PrefillInbox]:
        if self.in_step:
            return self.between.pop(0) if self.between else []
        taken, self.inboxes = self.inboxes, []
        return taken

    def send(self, outbox: object) -> None:
        assert isinstance(outbox, PrefillOutbox)
        self.outboxes.append(outbox)

    def wake(self) -> None:
        """Nobody sleeps here."""


class Runner(ToyRunner):
    """Tells the post when a step runs, and keeps what came of each."""

    def __init__(self, post: Post) -> None:
        super().__init__(num_blocks=256)
        self.post = post
        self.outcomes: list[StepOutcome] = []

    def run(self, plan, stop=None) -> StepOutcome:  # type: ignore[no-untyped-def]
        self.post.in_step = True
        self.outcomes.append(super().run(plan, stop))
        self.post.in_step = False
        return self.outcomes[-1]


class Rig:
    """One prefill engine. `tail` leaves room in its step for the beginning of `head`."""

    def __init__(self) -> None:
        self.post = Post()
        self.runner = Runner(self.post)
        settings = LoopSettings(EngineSettings("toy"), ChannelSettings("memory", "", ""), 8, 2, 30.0, False)
        self.loop = PrefillLoop(self.post, self.runner, MemoryFabric().open(), settings)
        self.begin(TAIL, 40)
        self.begin(HEAD, 400)

    def begin(self, key: AttemptKey, length: int) -> None:
        tokens = [(7 * i + 11 * length) % 250 + 1 for i in range(length)]
        root = cache_root(LAYOUT, b"", "", "")
        self.post.inboxes.append(PrefillInbox(begins=[Begun(key, tokens, GREEDY, [], 0, root, 0)]))

    def first_tokens(self) -> dict[str, int]:
        manifests = [manifest for outbox in self.post.outboxes for manifest in outbox.manifests]
        return {manifest.key.request_id: manifest.first_token for manifest in manifests}

    def owned(self) -> int:
        return self.loop._pools.audit()[0].owned

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.loop.close()


def stop(*keys: AttemptKey) -> PrefillInbox:
    return PrefillInbox(stops=[Stopped(key) for key in keys])


def undisturbed() -> dict[str, int]:
    rig = Rig()
    rig.turns(8)
    rig.loop.close()
    return rig.first_tokens()


def test_a_step_is_given_up_for_a_part_of_it_and_the_others_lose_nothing(rig: Rig) -> None:
    rig.post.between = [[stop(TAIL)]]
    rig.loop.turn()
    assert [outcome.aborted for outcome in rig.runner.outcomes] == [True]
    rig.turns(8)
    assert rig.first_tokens() == {"head": undisturbed()["head"]}
    assert [outcome.aborted for outcome in rig.runner.outcomes[1:3]] == [False, False]


def test_it_is_not_given_up_twice_in_a_row(rig: Rig) -> None:
    rig.post.between = [[stop(TAIL)]]
    rig.loop.turn()
    rig.begin(LAST, 40)
    rig.post.between = [[stop(LAST)]]
    rig.turns(2)
    assert [outcome.aborted for outcome in rig.runner.outcomes[:3]] == [True, False, False]
    rig.turns(8)
    assert rig.first_tokens()["head"] == undisturbed()["head"]


def test_one_that_does_not_run_is_free_before_the_step_ends(rig: Rig) -> None:
    rig.begin(LAST, 400)  # admitted, and no room in this step
    seen: list[int] = []
    blocks = 400 // 4

    class Looking(list[PrefillInbox]):
        """Read at the next look between layers."""

        def __iter__(self) -> Iterator[PrefillInbox]:
            seen.append(rig.owned())
            return super().__iter__()

    rig.post.between = [Looking(), [stop(LAST)], Looking()]
    rig.loop.turn()
    assert [outcome.aborted for outcome in rig.runner.outcomes] == [False]
    assert seen[0] - seen[-1] == blocks
    rig.turns(8)
    assert rig.first_tokens() == undisturbed()


def test_a_question_is_answered_while_a_step_runs(rig: Rig) -> None:
    rig.post.between = [[PrefillInbox(looks=[5])]]
    answered: list[bool] = []
    send = rig.post.send

    def sent(outbox: object) -> None:
        send(outbox)
        if isinstance(outbox, PrefillOutbox) and outbox.load is not None and outbox.load.look == 5:
            answered.append(rig.post.in_step)

    rig.post.send = sent  # type: ignore[method-assign]
    rig.loop.turn()
    assert answered[0] is True
    load = next(o.load for o in rig.post.outboxes if o.load is not None and o.load.look == 5)
    assert {held.name for held in load.held if held.kind == "attempt"} == {"tail/1", "head/1"}
