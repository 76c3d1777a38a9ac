"""Who hears of a request on a decode worker: sessions that break, others that attach, and nobody in time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diptych.domain.errors import Stale
from diptych.domain.ids import RequestId
from diptych.domain.sampling import SamplingParams
from diptych.rpc.params import params_to_proto
from diptych.text.tokenizer import ByteTokenizer
from diptych.v1 import common_pb2, decode_pb2
from services.decode.deliveries import ACKNOWLEDGE_S, PIECE_TOKENS, Deliveries, Delivery
from services.decode.messages import FinishInfo, TokensOut, TrailInfo
from services.decode.outputs import Output
from services.decode.sessions import Assembly, RouterSession

BYTES = ByteTokenizer()
TRAIL = TrailInfo("", "local", "short_prompt", 0, 3, 0, 0, 0, "", 0, 0, 0, 0, 0, 0, 0, {})
NAME = RequestId("r")
GRACE_S = 10.0
PARAMS = SamplingParams(max_tokens=50, seed=3, temperature=0.5)


class Rig:
    """Deliveries, an engine that only notes what it is asked for, and a clock."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.now = 100.0
        self.cancelled: list[str] = []
        self.all = Deliveries(grace_s, self.cancelled.append, lambda: self.now)
        self.a, self.b = RouterSession("router-a", 1), RouterSession("router-b", 2)

    def submit(self, session: RouterSession, tokens: Sequence[int] = b"hello", num_output: int = 0) -> bool:
        """Whether it went to the engine."""
        whole = assembly(tokens, num_output)
        if self.all.must_wait(session, whole):
            return False
        self.all.add(session, whole, Output(BYTES, PARAMS, list(tokens[len(tokens) - num_output :])))
        return True

    def draw(self, tokens: bytes, reason: str = "") -> list[tuple[RouterSession, Assembly]]:
        """The engine says something of the request."""
        delivery = self.delivery
        index = len(delivery.output.tokens)
        finish = FinishInfo(reason, TRAIL) if reason else None
        delta = delivery.output.delta(TokensOut(NAME, index, list(tokens), finish), "w")
        if delta is not None and delivery.session is not None:
            delivery.session.send([delta])
        return self.all.ended(delivery) if reason else []

    def attach(self, session: RouterSession, next_index: int, tenant: str = "acme", turn: int = 0) -> None:
        message = decode_pb2.SessionAttach(request_id=NAME, tenant=tenant, next_index=next_index, turn=turn)
        self.all.attach(session, message)

    @property
    def delivery(self) -> Delivery:
        delivery = self.all.get(NAME)
        assert delivery is not None
        return delivery

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.all.expire()


def assembly(tokens: Sequence[int], num_output: int = 0) -> Assembly:
    submit = decode_pb2.Submit(
        request_id=NAME, tenant="acme", cache_salt="s", params=params_to_proto(PARAMS), priority=-1,
        num_tokens=len(tokens), num_output=num_output, tokens=tokens[:3], placement=2,
    )  # fmt: skip
    return Assembly(submit, list(tokens))


def heard(session: RouterSession) -> list[decode_pb2.SessionResponse]:
    """All that waits to be sent."""
    found = []
    while not session._queue.empty():
        response = session._queue.get_nowait()
        assert response is not None
        found.append(response)
    return found


def text_of(responses: list[decode_pb2.SessionResponse]) -> str:
    return "".join(delta.text for response in responses for delta in response.deltas)


def finish_of(responses: list[decode_pb2.SessionResponse]) -> common_pb2.Finish:
    delta = responses[-1].deltas[-1]
    assert delta.HasField("finish")
    return delta.finish


def test_a_broken_session_cancels_nothing_until_the_grace_is_over() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"ab")
    rig.all.detach(rig.a)
    rig.draw(b"c")
    rig.wait(GRACE_S - 0.1)
    assert rig.cancelled == []
    rig.wait(0.2)
    rig.wait(0.2)
    assert rig.cancelled == [NAME], "once"
    assert rig.all.num_running == 1, "until the engine has confirmed"
    rig.draw(b"", "abort")
    assert len(rig.all) == 0
    assert rig.all.counters == {"detached": 1, "detached_expired": 1}


def test_without_a_grace_it_is_cancelled_at_once() -> None:
    rig = Rig(grace_s=0.0)
    rig.submit(rig.a)
    rig.all.detach(rig.a)
    assert rig.cancelled == [NAME]


@pytest.mark.parametrize("next_index", [0, 1, 3])
def test_who_attaches_gets_the_past_and_then_the_present(next_index: int) -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"ab")
    rig.all.detach(rig.a)
    rig.draw(b"c")
    rig.attach(rig.b, next_index)
    rig.draw(b"d", "length")

    first, *rest = heard(rig.b)
    attached = first.attached
    assert bytes(attached.tokens) == b"hello" + b"abc"[:next_index]
    assert (attached.num_tokens, attached.num_output) == (5 + next_index, next_index)
    assert (attached.tenant, attached.cache_salt, attached.priority, attached.placement) == (
        "acme", "s", -1, 2,
    )  # fmt: skip
    assert attached.params == params_to_proto(PARAMS)
    assert text_of(rest) == "abcd"[next_index:]
    assert [delta.index for r in rest for delta in r.deltas] == sorted({next_index, 3})
    assert finish_of(rest).reason == common_pb2.FINISH_REASON_LENGTH
    rig.wait(GRACE_S + 1)
    assert rig.cancelled == []


def test_a_resumed_request_tells_what_it_was_given_too() -> None:
    rig = Rig()
    rig.submit(rig.a, b"helloab", num_output=2)
    rig.draw(b"c")
    rig.all.detach(rig.a)
    rig.attach(rig.b, 1)
    first, *rest = heard(rig.b)
    assert bytes(first.attached.tokens) == b"helloa"
    assert text_of(rest) == "bc"


def test_a_long_request_comes_in_pieces() -> None:
    rig = Rig()
    prompt = bytes(i % 251 for i in range(2 * PIECE_TOKENS + 7))
    rig.submit(rig.a, prompt)
    rig.draw(b"ab")
    rig.all.detach(rig.a)
    rig.attach(rig.b, 2)
    first, *pieces = heard(rig.b)
    tokens = list(first.attached.tokens)
    for piece in pieces:
        assert piece.piece.offset == len(tokens)
        tokens += piece.piece.tokens
    assert bytes(tokens) == prompt + b"ab"
    assert first.attached.num_tokens == len(tokens)
    assert max(response.ByteSize() for response in [first, *pieces]) < 32_000


def test_the_last_word_is_kept_until_it_is_acknowledged_and_for_a_grace() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"ab", "length")
    assert rig.all.num_running == 0
    assert rig.a.requests == set()
    rig.all.acknowledge(rig.b, NAME)
    rig.wait(GRACE_S + 1)
    assert len(rig.all) == 1, "that one does not have it"
    rig.all.acknowledge(rig.a, NAME)
    rig.wait(GRACE_S - 1)
    rig.attach(rig.b, 1)
    assert text_of(heard(rig.b)[1:]) == "b", "the router died before its last bytes had left"
    rig.all.acknowledge(rig.a, NAME)
    rig.wait(GRACE_S + 1)
    assert len(rig.all) == 1
    rig.all.acknowledge(rig.b, NAME)
    rig.wait(GRACE_S + 1)
    assert len(rig.all) == 0
    rig.all.acknowledge(rig.b, NAME)


def test_a_cancel_that_comes_after_the_last_word_leaves_nothing() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"xyz", "length")
    rig.all.cancel(rig.b, NAME)
    assert len(rig.all) == 1
    rig.all.cancel(rig.a, NAME)
    assert len(rig.all) == 0
    assert rig.cancelled == []


def test_a_running_request_cannot_be_acknowledged() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.all.acknowledge(rig.a, NAME)
    rig.wait(GRACE_S + 1)
    assert (rig.all.num_running, rig.cancelled) == (1, [])


def test_what_ended_while_nobody_heard_is_there_for_a_grace() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.all.detach(rig.a)
    rig.wait(GRACE_S - 1)
    rig.draw(b"ab", "length")
    rig.wait(GRACE_S - 1)
    rig.attach(rig.b, 1)
    _, *rest = heard(rig.b)
    assert text_of(rest) == "b"
    assert finish_of(rest).reason == common_pb2.FINISH_REASON_LENGTH
    rig.all.acknowledge(rig.b, NAME)
    rig.wait(GRACE_S)
    assert len(rig.all) == 0


def test_what_ended_is_not_kept_for_ever() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"ab", "length")
    rig.wait(ACKNOWLEDGE_S + 1)
    assert len(rig.all) == 0

    rig.submit(rig.a)
    rig.draw(b"ab", "length")
    rig.all.detach(rig.a)
    rig.wait(GRACE_S + 1)
    assert len(rig.all) == 0
    assert rig.cancelled == []


def test_the_newest_attachment_wins_and_the_older_hears_of_its_end() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"ab")
    rig.attach(rig.b, 0)
    rig.draw(b"c")
    end = finish_of(heard(rig.a))
    assert (end.reason, end.failure.message.split(":")[0]) == (common_pb2.FINISH_REASON_ABORT, "superseded")
    assert text_of(heard(rig.b)) == "abc"
    assert (rig.a.requests, rig.b.requests) == (set(), {NAME})
    rig.all.cancel(rig.a, NAME)
    rig.all.detach(rig.a)
    rig.wait(GRACE_S + 1)
    assert rig.cancelled == [], "it is not theirs any more"


def test_an_attachment_that_comes_late_takes_nothing_from_a_later_one() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"xy")
    heard(rig.a)
    rig.attach(rig.b, 1, turn=2)
    heard(rig.b)
    rig.attach(rig.a, 0, turn=1)
    assert "a later call has attached" in heard(rig.a)[-1].refused.failure.message
    rig.all.cancel(rig.a, NAME)  # its caller went long ago
    assert not rig.cancelled
    rig.draw(b"z")
    assert [list(delta.tokens) for delta in heard(rig.b)[0].deltas] == [[ord("z")]]
    rig.attach(rig.a, 3, turn=3)
    assert heard(rig.a)[0].attached.num_output == 3


def test_the_same_session_may_attach_again() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"ab")
    heard(rig.a)
    rig.attach(rig.a, 0)
    first, *rest = heard(rig.a)
    assert first.HasField("attached")
    assert text_of(rest) == "ab"
    assert not any(delta.HasField("finish") for r in rest for delta in r.deltas)


@pytest.mark.parametrize(
    ("next_index", "tenant", "kind", "words"),
    [
        (3, "acme", "InvalidField", "next_index: is 3, there are 2 tokens"),
        (0, "emca", "Stale", "r is not here"),
    ],
)
def test_an_attachment_that_is_wrong_changes_nothing(
    next_index: int, tenant: str, kind: str, words: str
) -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"ab")
    rig.attach(rig.b, next_index, tenant)
    (refused,) = heard(rig.b)
    assert refused.refused.failure.kind == kind
    assert words in refused.refused.failure.message
    rig.draw(b"c")
    assert text_of(heard(rig.a)) == "abc"


def test_nobody_attaches_to_what_is_not_there_or_was_cancelled() -> None:
    rig = Rig()
    rig.attach(rig.b, 0)
    assert heard(rig.b)[0].refused.failure.kind == "Stale"
    rig.submit(rig.a)
    rig.all.cancel(rig.a, NAME)
    assert rig.cancelled == [NAME]
    rig.attach(rig.b, 0)
    assert "was cancelled" in heard(rig.b)[0].refused.failure.message
    rig.draw(b"", "abort")
    assert finish_of(heard(rig.a)).reason == common_pb2.FINISH_REASON_ABORT
    assert len(rig.all) == 0, "nobody will acknowledge what was given up"


def test_a_router_that_opens_another_session_has_given_up_what_it_had() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.all.detach(rig.a)
    rig.all.give_up(("router-a", 2))
    rig.all.give_up(("router-b", 1))
    assert rig.cancelled == [], "another start of it, and another router"
    rig.all.give_up(("router-a", 1))
    assert rig.cancelled == [NAME]


def test_what_another_took_over_is_not_given_up_by_the_first() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.attach(rig.b, 0)
    rig.all.detach(rig.b)
    rig.all.give_up(rig.a.router)
    assert rig.cancelled == []


def test_a_request_that_comes_back_waits_for_its_cancelled_self() -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.draw(b"ab")
    rig.all.detach(rig.a)
    rig.all.give_up(rig.a.router)
    again = RouterSession("router-a", 1)
    assert not rig.submit(again, b"helloab", num_output=2)
    rig.draw(b"x")
    ((session, whole),) = rig.draw(b"", "abort")
    assert session is again
    assert rig.submit(session, bytes(whole.tokens), whole.submit.num_output)
    rig.draw(b"c")
    deltas = [delta for response in heard(again) for delta in response.deltas]
    assert [(delta.index, delta.text) for delta in deltas] == [(2, "c")]


@pytest.mark.parametrize("way", ["cancelled", "broken"])
def test_one_that_waits_may_be_given_up_too(way: str) -> None:
    rig = Rig()
    rig.submit(rig.a)
    rig.all.detach(rig.a)
    rig.all.give_up(rig.a.router)
    rig.submit(rig.b)
    if way == "cancelled":
        assert not rig.all.forget_waiting(rig.a, NAME)
        assert rig.all.forget_waiting(rig.b, NAME)
    else:
        rig.all.detach(rig.b)
    assert rig.draw(b"", "abort") == []
    assert len(rig.all) == 0


def test_a_request_that_is_wanted_is_not_taken_twice() -> None:
    rig = Rig()
    rig.submit(rig.a)
    with pytest.raises(Stale, match="is here already"):
        rig.submit(rig.b)
    rig.draw(b"a", "length")
    assert rig.submit(rig.b), "its router never heard that it has ended"
