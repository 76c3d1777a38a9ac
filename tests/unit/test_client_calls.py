"""Both clients against a scripted router over real gRPC: the same calls, the same values, the same errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from diptych.client import AsyncClient, Client, Finish, ModelInfo, Piece, Trail
from diptych.domain import errors
from diptych.domain.records import Role
from diptych.v1 import common_pb2, router_pb2, worker_pb2
from tests.support.fake_router import DEADLINE_S, HOLD, FakeRouter, failed, last, pieces, worker

Call = Callable[..., Any]


def blocking(address: str, method: str, *args: Any, **kwargs: Any) -> Any:
    with Client(address, tenant="t") as client:
        answer = getattr(client, method)(*args, **kwargs)
        return list(answer) if method == "generate" else answer


def awaited(address: str, method: str, *args: Any, **kwargs: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(address, tenant="t") as client:
            answer = getattr(client, method)(*args, **kwargs)
            return [piece async for piece in answer] if method == "generate" else await answer

    return asyncio.run(run())


@pytest.fixture(params=[blocking, awaited])
def call(request: pytest.FixtureRequest) -> Call:
    chosen: Call = request.param
    return chosen


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter() as fake:
        yield fake


def test_pieces_come_in_order_and_the_last_tells_the_trail(router: FakeRouter, call: Call) -> None:
    trail = {
        "path": common_pb2.PREFILL_PATH_DISAGGREGATED,
        "kv_bytes": 9,
        "num_output_tokens": 3,
        "decode_s": 0.5,
    }
    fallbacks = [common_pb2.Fallback(reason="peer_lost", count=2)]
    router.scripts = [[*pieces("Hel", "lo"), last("STOP", 2, **trail, fallbacks=fallbacks)]]

    first, second, end = call(router.address, "generate", "Hi", max_tokens=3)

    assert first == Piece("r-1", 0, (100,), "Hel")
    assert (second.index, second.text, second.finish) == (1, "lo", None)
    expected = Trail(
        path="disaggregated", kv_bytes=9, num_output_tokens=3, decode_s=0.5, fallbacks={"peer_lost": 2}
    )
    assert end.finish == Finish("stop", "", expected)
    assert end.finish.trail.tpot_s == 0.25


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"prompt": "Hi"}, {"prompt": "Hi"}),
        ({"prompt": ""}, {"prompt": ""}),
        ({"token_ids": [1, 2]}, {"token_ids": router_pb2.TokenIds(ids=[1, 2])}),
        ({"token_ids": []}, {"token_ids": router_pb2.TokenIds()}),
        (
            {"messages": [{"role": "user", "content": "Hi"}]},
            {"chat": router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="Hi")])},
        ),
        ({"messages": []}, {"chat": router_pb2.Chat()}),
    ],
)
def test_each_input_is_sent_as_it_is(router: FakeRouter, call: Call, given: Any, sent: Any) -> None:
    router.scripts = [[last()]]
    call(router.address, "generate", **given)
    params = common_pb2.SamplingParams(max_tokens=256)
    asked = router_pb2.GenerateRequest(tenant="t", params=params, heartbeat_s=0.25, **sent)
    assert router.requests == [asked]


def test_options_are_sent_under_their_names(router: FakeRouter, call: Call) -> None:
    router.scripts = [[last()]]
    params = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 2**64 - 1,
        "stop": ["a", "b"], "stop_token_ids": (3,), "ignore_eos": True, "min_tokens": 2, "n": 1,
    }  # fmt: skip
    outer = {"label": "mine", "priority": -3, "cache_salt": "s"}

    call(router.address, "generate", "Hi", model="toy", **params, **outer)

    sent = common_pb2.SamplingParams(**params)
    assert router.requests == [
        router_pb2.GenerateRequest(
            model="toy", prompt="Hi", params=sent, tenant="t", heartbeat_s=0.25, **outer
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "input"),
        ({"prompt": "Hi", "token_ids": [1]}, "input"),
        ({"prompt": "Hi", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "Hi", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "Hi", "seed": 2**64}, "seed"),
        ({"prompt": "Hi", "stop": "ab"}, "stop"),
        ({"prompt": "Hi", "temprature": 1.0}, "temprature"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"token_ids": [-1]}, "ids"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]"),
    ],
)
def test_what_cannot_be_sent_is_refused_here(
    router: FakeRouter, call: Call, arguments: Any, field: str
) -> None:
    with pytest.raises(errors.InvalidField, match=f"^{field}: "):
        call(router.address, "generate", **arguments)
    assert router.requests == []


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidField("params.top_p", "must be from 0 to 1, is 2"),
        errors.UnknownModel("no worker serves 'x'"),
        errors.TooLarge("9000 tokens, the context has 8192"),
        errors.Overloaded("the queue is full", retry_after_s=2.5),
        errors.Draining("leaving"),
        errors.Internal("broken"),
    ],
)
def test_a_refusal_comes_back_as_the_same_error(
    router: FakeRouter, call: Call, error: errors.DiptychError
) -> None:
    router.scripts = [[error]]
    with pytest.raises(type(error)) as caught:
        call(router.address, "generate", "Hi")
    assert str(caught.value) == str(error)
    assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("PeerLost", "decode-0 died", errors.PeerLost),
        ("InvalidField", "prompt: is empty", errors.InvalidField),
        ("Overloaded", "full", errors.Overloaded),
        ("SomethingNewer", "who knows", errors.DiptychError),
        ("annotations", "not a class of the tree", errors.DiptychError),
    ],
)
def test_a_stream_that_fails_raises_its_first_cause(
    router: FakeRouter, call: Call, kind: str, message: str, expected: type[errors.DiptychError]
) -> None:
    router.scripts = [[*pieces("He"), failed(kind, message)]]
    with pytest.raises(expected) as caught:
        call(router.address, "generate", "Hi")
    assert type(caught.value) is expected
    assert str(caught.value) == message


def test_a_stream_without_a_last_message_is_a_loss(router: FakeRouter, call: Call) -> None:
    router.scripts = [pieces("He")]
    with pytest.raises(errors.PeerLost, match="before its last message"):
        call(router.address, "generate", "Hi")


def test_nobody_there_is_a_lost_peer(call: Call) -> None:
    for method in ("status", "models"):
        with pytest.raises(errors.PeerLost):
            call("127.0.0.1:1", method)
    with pytest.raises(errors.PeerLost):
        call("127.0.0.1:1", "generate", "Hi")


def test_cancel_by_id(router: FakeRouter, call: Call) -> None:
    router.live = {"r-1"}
    assert call(router.address, "cancel", "r-1") is True
    assert call(router.address, "cancel", "r-2") is False


def test_status_and_models(router: FakeRouter, call: Call) -> None:
    load = {"num_running": 2, "blocks_free": 5, "blocks_cached": 1, "blocks_total": 8, "tpot_s": 0.01}
    router.status.workers.append(worker("decode-0", worker_pb2.ROLE_DECODE, **load))
    router.status.workers.append(worker("odd", 99))  # type: ignore[arg-type]
    router.status.fallbacks.add(reason="no_prefill_worker", count=3)

    status = call(router.address, "status")

    decode, odd = status.workers
    assert (decode.worker_id, decode.role, decode.pid, decode.num_running) == (
        "decode-0",
        Role.DECODE,
        4242,
        2,
    )
    assert (decode.blocks_used, decode.blocks_total, decode.tpot_s) == (2, 8, 0.01)
    assert odd.role is None
    assert status.store_available
    assert status.fallbacks == {"no_prefill_worker": 3}
    assert call(router.address, "models") == (ModelInfo("toy", 4096, "f0"),)


def test_closing_the_iterator_cancels_on_the_router(router: FakeRouter) -> None:
    router.scripts = [[*pieces("He"), HOLD]]
    with Client(router.address) as client, client.generate("Hi") as generation:
        assert next(generation).text == "He"
        assert generation.request_id == "r-1"
        generation.close()
        assert router.cancelled.wait(DEADLINE_S)
        assert list(generation) == []


async def test_closing_the_async_iterator_cancels_on_the_router(router: FakeRouter) -> None:
    router.scripts = [[*pieces("He"), HOLD]]
    async with AsyncClient(router.address) as client:
        async with client.generate("Hi") as generation:
            assert (await anext(generation)).text == "He"
            assert generation.request_id == "r-1"
        assert await asyncio.to_thread(router.cancelled.wait, DEADLINE_S)
        assert [piece async for piece in generation] == []


async def test_cancelling_the_task_cancels_on_the_router(router: FakeRouter) -> None:
    router.scripts = [[*pieces("He"), HOLD]]
    got_one = asyncio.Event()

    async def read(pieces: AsyncIterator[Piece]) -> None:
        async for _ in pieces:
            got_one.set()

    async with AsyncClient(router.address) as client:
        task = asyncio.ensure_future(read(client.generate("Hi")))
        await asyncio.wait_for(got_one.wait(), DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.cancelled.wait, DEADLINE_S)


def test_a_deadline_ends_a_stream_that_says_nothing(router: FakeRouter) -> None:
    router.scripts = [[*pieces("He"), HOLD]]
    with Client(router.address, timeout_s=0.3) as client, pytest.raises(errors.DeadlineExceeded):
        list(client.generate("Hi"))
    assert router.cancelled.wait(DEADLINE_S)
