"""Both clients when their router goes: they attach with their token, at whichever router answers."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diptych.client import AsyncClient, Client, Piece
from diptych.client import course as course_module
from diptych.client.course import Course
from diptych.domain import errors
from diptych.v1 import router_pb2
from tests.support.fake_router import DEADLINE_S, HOLD, LOSE, STOP, FakeRouter, Step, failed, last, pieces

Run = Callable[..., tuple[list[Piece], int]]


def blocking(address: Any, **options: Any) -> tuple[list[Piece], int]:
    with Client(address, tenant="t", **options) as client:
        answer = client.generate("Hi")
        return list(answer), answer.num_reattached


def awaited(address: Any, **options: Any) -> tuple[list[Piece], int]:
    async def run() -> tuple[list[Piece], int]:
        async with AsyncClient(address, tenant="t", **options) as client:
            answer = client.generate("Hi")
            return [piece async for piece in answer], answer.num_reattached

    return asyncio.run(run())


@pytest.fixture(params=[blocking, awaited])
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = request.param
    return chosen


@pytest.fixture
def routers() -> Iterator[tuple[FakeRouter, FakeRouter]]:
    with FakeRouter() as a, FakeRouter() as b:
        yield a, b


@pytest.fixture
def router(routers: tuple[FakeRouter, FakeRouter]) -> FakeRouter:
    return routers[0]


def token(value: bytes, index: int = 0) -> Step:
    return router_pb2.GenerateResponse(request_id="r-1", index=index, resume_token=value)


def text_of(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


def attach(resume_token: bytes, next_index: int, turn: int = 1) -> router_pb2.AttachRequest:
    return router_pb2.AttachRequest(
        resume_token=resume_token,
        next_index=next_index,
        tenant="t",
        heartbeat_s=course_module.HEARTBEAT_S,
        turn=turn,
    )


def nowhere() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_lost_stream_goes_on_with_the_latest_token(router: FakeRouter, run: Run) -> None:
    router.scripts = [
        [token(b"first"), *pieces("a", "b"), token(b"second", 2), LOSE],
        [token(b"third", 2), *pieces("c", first=2), LOSE],
        [*pieces("d", first=3), last(index=4)],
    ]
    found, num_reattached = run(router.address)
    assert text_of(found) == "abcd"
    assert [t for piece in found for t in piece.tokens] == [100, 101, 102, 103]
    assert num_reattached == 2
    assert router.attaches == [attach(b"second", 2), attach(b"third", 3, turn=2)]
    assert len(router.requests) == 1


def test_a_stream_that_just_ends_is_a_loss_too(router: FakeRouter, run: Run) -> None:
    router.scripts = [[token(b"x"), *pieces("a")], [last(index=1)]]
    found, _ = run(router.address)
    assert found[-1].finish is not None


def test_a_token_in_the_metadata_serves_before_the_first_message(router: FakeRouter, run: Run) -> None:
    router.early_token = b"early"
    router.scripts = [[LOSE], [*pieces("a"), last(index=1)]]
    assert text_of(run(router.address)[0]) == "a"
    assert router.attaches == [attach(b"early", 0)]


def test_attempts_go_on_while_an_error_may_pass(router: FakeRouter, run: Run) -> None:
    router.scripts = [
        [token(b"x"), *pieces("a"), LOSE],
        [errors.PeerLost("not linked yet")],
        [LOSE],
        [errors.Draining("leaving")],
        [*pieces("b", first=1), last(index=2)],
    ]
    found, num_reattached = run(router.address)
    assert (text_of(found), num_reattached) == ("ab", 1)
    assert len(router.attaches) == 4


@pytest.mark.parametrize(
    "error",
    [
        errors.Stale("decode worker d@1, which had the request, is gone: ask again"),
        errors.InvalidField("resume_token", "belongs to another tenant"),
    ],
)
def test_a_word_that_is_final_ends_the_stream(
    router: FakeRouter, run: Run, error: errors.DiptychError
) -> None:
    router.scripts = [[token(b"x"), *pieces("a"), LOSE], [error]]
    with pytest.raises(type(error)) as caught:
        run(router.address)
    assert str(caught.value) == str(error)


def test_without_a_token_a_loss_is_the_end(router: FakeRouter, run: Run) -> None:
    router.scripts = [[*pieces("a"), LOSE]]
    with pytest.raises(errors.PeerLost, match="Socket closed"):
        run(router.address)
    assert router.attaches == []


def test_a_router_that_stops_is_left_for_another(routers: tuple[FakeRouter, FakeRouter], run: Run) -> None:
    a, b = routers
    a.scripts = [[token(b"x"), *pieces("a"), STOP]]
    b.scripts = [[*pieces("b", first=1), last(index=2)]]
    found, num_reattached = run([a.address, b.address])
    assert (text_of(found), num_reattached) == ("ab", 1)
    assert b.attaches == [attach(b"x", 1)]
    assert a.cancelled.wait(DEADLINE_S)


def test_a_router_that_has_nothing_to_tell_is_not_left(router: FakeRouter, run: Run) -> None:
    """It lives, for longer than silence is borne."""
    beats: list[Step] = [token(b"x")] * 3
    router.scripts = [[*beats, HOLD]]
    router.hold_s = 2 * course_module.FIRST_PATIENCE * course_module.HEARTBEAT_S
    router.after_hold = [*pieces("a"), last(index=1)]
    found, num_reattached = run(router.address)
    assert (text_of(found), num_reattached) == ("a", 0)


def test_a_call_that_fell_silent_is_left_only_for_one_that_speaks(
    routers: tuple[FakeRouter, FakeRouter], run: Run
) -> None:
    """Closed before, it would tell a router that was only busy to end the request."""
    a, b = routers
    a.scripts = [[token(b"x"), *pieces("a"), STOP], [*pieces("b", first=1), last(index=2)]]
    b.scripts = [[STOP]]
    was_cancelled: list[bool] = []
    a.on_attach = lambda: was_cancelled.extend([a.cancelled.is_set(), b.cancelled.is_set()])
    found, _ = run([a.address, b.address])
    assert text_of(found) == "ab"
    assert was_cancelled == [False, False]
    assert [request.turn for request in (*b.attaches, *a.attaches)] == [1, 2]
    assert a.cancelled.wait(DEADLINE_S)
    assert b.cancelled.wait(DEADLINE_S)


def test_what_no_router_took_in_is_asked_anew(router: FakeRouter, run: Run) -> None:
    router.scripts = [[LOSE], [router_pb2.GenerateResponse()], [*pieces("a"), last(index=1)]]
    assert text_of(run(router.address)[0]) == "a"
    assert len(router.requests) == 3
    assert router.attaches == []


def test_a_request_of_which_no_worker_has_heard_is_asked_anew(router: FakeRouter, run: Run) -> None:
    gone = errors.Stale("r-1 is not here, or not any more")
    router.scripts = [[token(b"x"), LOSE], [gone], [*pieces("a"), last(index=1)]]
    assert text_of(run(router.address)[0]) == "a"
    assert (len(router.requests), len(router.attaches)) == (2, 1)


def test_what_somebody_cancelled_is_not_asked_anew(router: FakeRouter, run: Run) -> None:
    router.scripts = [[token(b"x"), LOSE], [errors.Cancelled("r-1 was cancelled")]]
    with pytest.raises(errors.Cancelled):
        run(router.address)


def test_an_answer_to_what_was_asked_anew_is_final(router: FakeRouter, run: Run) -> None:
    router.scripts = [[LOSE], [errors.Overloaded("the queue is full", retry_after_s=3.0)]]
    with pytest.raises(errors.Overloaded):
        run(router.address)


def test_when_nobody_is_there_that_is_told_at_once(run: Run) -> None:
    with pytest.raises(errors.PeerLost, match="failed to connect"):
        run(nowhere())


def test_an_answer_that_is_forgotten_is_closed(router: FakeRouter) -> None:
    router.scripts = [[*pieces("a"), HOLD]]
    with Client(router.address) as client:
        answer = client.generate("Hi")
        next(answer)
        del answer
        gc.collect()
        assert router.cancelled.wait(DEADLINE_S)


def test_who_does_not_want_it_hears_of_the_loss(router: FakeRouter, run: Run) -> None:
    router.scripts = [[token(b"x"), *pieces("a"), LOSE]]
    with pytest.raises(errors.PeerLost, match="Socket closed"):
        run(router.address, reattach_s=0.0)
    assert router.attaches == []


@pytest.mark.parametrize("step", [errors.PeerLost("decode died"), failed("PeerLost", "decode died")])
def test_a_loss_behind_the_router_is_not_its_own(router: FakeRouter, run: Run, step: Step) -> None:
    router.scripts = [[token(b"x"), *pieces("a"), step]]
    with pytest.raises(errors.PeerLost, match=r"^decode died$"):
        run(router.address)
    assert router.attaches == []


def test_attempts_end_after_a_time_with_the_first_cause(router: FakeRouter, run: Run) -> None:
    router.scripts = [[token(b"x"), *pieces("a"), LOSE], *[[errors.PeerLost("not yet")]] * 50]
    with pytest.raises(errors.PeerLost, match=r"Socket closed.*within 0\.3 s: not yet"):
        run(router.address, reattach_s=0.3)


def test_the_callers_own_deadline_holds(router: FakeRouter, run: Run) -> None:
    router.scripts = [[token(b"x"), *pieces("a"), LOSE], [HOLD]]
    with pytest.raises(errors.DeadlineExceeded):
        run(router.address, timeout_s=1.0)


@pytest.mark.parametrize("index", [0, 2])
def test_a_router_that_repeats_or_skips_is_not_believed(router: FakeRouter, run: Run, index: int) -> None:
    router.scripts = [[token(b"x"), *pieces("a"), LOSE], pieces("b", first=index)]
    with pytest.raises(errors.Internal, match=f"output {index} where 1 was next"):
        run(router.address)


def test_the_other_router_goes_on(routers: tuple[FakeRouter, FakeRouter], run: Run) -> None:
    a, b = routers
    a.scripts = [[token(b"x"), *pieces("a"), LOSE]]
    b.scripts = [[*pieces("b", first=1), last(index=2)]]
    assert text_of(run(f"{a.address}, {b.address}")[0]) == "ab"
    assert b.attaches == [attach(b"x", 1)]


def test_of_several_routers_the_first_that_is_there_is_asked(router: FakeRouter, run: Run) -> None:
    router.scripts = [[*pieces("a"), last(index=1)]]
    assert text_of(run([nowhere(), router.address])[0]) == "a"


def test_a_router_that_leaves_sends_to_the_next(routers: tuple[FakeRouter, FakeRouter], run: Run) -> None:
    a, b = routers
    a.scripts = [[errors.Draining("leaving")]]
    b.scripts = [[*pieces("a"), last(index=1)]]
    assert text_of(run([a.address, b.address])[0]) == "a"


def test_when_all_leave_that_is_the_answer(routers: tuple[FakeRouter, FakeRouter], run: Run) -> None:
    for router in routers:
        router.scripts = [[errors.Draining("leaving")]]
    with pytest.raises(errors.Draining):
        run([router.address for router in routers])


def test_other_questions_go_to_a_router_that_answers(router: FakeRouter) -> None:
    router.live = {"r-1"}
    addresses = [nowhere(), router.address]
    with Client(addresses) as client:
        assert client.status().router_id == "router-0"
        assert client.address == router.address
        assert client.models()[0].name == "toy"
    with Client(addresses) as client:
        assert client.cancel("r-1")
        with pytest.raises(errors.PeerLost):
            client.cancel("r-2")  # the one that is away may have it

    async def ask() -> None:
        async with AsyncClient(addresses) as client:
            assert (await client.status()).router_id == "router-0"
            assert (await client.models())[0].name == "toy"
        async with AsyncClient(addresses) as client:
            assert await client.cancel("r-1")
            with pytest.raises(errors.PeerLost):
                await client.cancel("r-2")

    asyncio.run(ask())


@pytest.mark.parametrize("address", ["", "a:1,,b:2", [], ["a:1", ""]])
def test_an_address_that_is_none_is_refused(address: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(errors.InvalidField, match="^address: "):
            kind(address)


def test_a_closed_client_does_not_attach(router: FakeRouter) -> None:
    router.scripts = [[token(b"x"), *pieces("a"), HOLD]]
    client = Client(router.address)
    answer = client.generate("Hi")
    next(answer)
    client.close()
    with pytest.raises(errors.DiptychError):
        next(answer)
    assert router.attaches == []


def test_patience_grows_with_each_silence_up_to_a_bound() -> None:
    course, borne = Course("t", 1, reattach_s=60.0), []
    course.take(router_pb2.GenerateResponse(request_id="r", resume_token=b"x"))
    for _ in range(8):
        borne.append(course.patience)
        course.after_loss(course_module.silence("a:1", course.patience), 0.0)
    assert borne[:3] == [course_module.FIRST_PATIENCE * 2**i for i in range(3)]
    assert borne[-1] == course_module.MAX_PATIENCE
    assert Course("t", 1, reattach_s=0.0).patience == course_module.MAX_PATIENCE


def test_pauses_grow_up_to_a_bound() -> None:
    course = Course("t", 1, reattach_s=60.0)
    course.take(router_pb2.GenerateResponse(request_id="r", resume_token=b"x"))
    now, pauses = 100.0, []
    with pytest.raises(errors.PeerLost):
        while True:
            again = course.after_loss(errors.PeerLost("gone"), now)
            assert again.attach
            pauses.append(again.pause_s)
            now += again.pause_s
    assert pauses[0] <= 1.5 * course_module.FIRST_PAUSE_S
    assert max(pauses) <= 1.5 * course_module.MAX_PAUSE_S
    assert 60 / 1.5 <= len(pauses) <= 2 * 60 + 20
    assert now - 100.0 <= 60.0
