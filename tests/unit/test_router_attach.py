"""Clients that come to a router with the resume token of another, or of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from diptych.client.values import Piece, read_piece
from diptych.domain.errors import DiptychError, InvalidField, PeerLost, Stale
from diptych.domain.ids import RequestId, Tenant
from diptych.rpc.status import domain_errors
from diptych.v1 import router_pb2
from diptych.v1.router_pb2_grpc import RouterStub
from services.router import attach
from services.router.decisions import WorkerRef
from services.router.server import RESUME_TOKEN
from services.router.tokens import Claims
from tests.support.fake_decode import DEADLINE_S, expected_output, until
from tests.support.resumable_decode import ResumableDecode
from tests.support.router_rig import RouterRig, text_of, tokens_of

PROMPT = "hello"
WHOLE = expected_output(PROMPT.encode(), 8)


class Stream:
    """One call, read message by message."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.token = b""
        self.pieces: list[Piece] = []

    async def read(self, num_messages: int = 1) -> None:
        for _ in range(num_messages):
            with domain_errors():
                message = await asyncio.wait_for(self.call.read(), DEADLINE_S)
            assert message is not grpc.aio.EOF
            self.token = message.resume_token or self.token
            self.pieces.append(read_piece(message))

    async def read_all(self) -> list[Piece]:
        while not self.pieces or self.pieces[-1].finish is None:
            await self.read()
        return self.pieces

    @property
    def reason(self) -> str:
        finish = self.pieces[-1].finish
        assert finish
        return finish.reason


@asynccontextmanager
async def stub_of(rig: RouterRig) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(rig.server.address) as channel:
        yield RouterStub(channel)


def generate(stub: Any, max_tokens: int = 8, tenant: str = "") -> Stream:
    request = router_pb2.GenerateRequest(prompt=PROMPT, tenant=tenant)
    request.params.max_tokens, request.params.seed = max_tokens, 7
    return Stream(stub.Generate(request))


def attach_to(stub: Any, token: bytes, next_index: int, tenant: str = "") -> Stream:
    return Stream(
        stub.Attach(router_pb2.AttachRequest(resume_token=token, next_index=next_index, tenant=tenant))
    )


class Pair:
    """Two routers that share their secret, and one call of the first that has its first token."""

    def __init__(self, worker: ResumableDecode, a: RouterRig, b: RouterRig, at_a: Any, at_b: Any) -> None:
        self.worker, self.a, self.b, self.at_a, self.at_b = worker, a, b, at_a, at_b

    async def begin(self, **options: Any) -> Stream:
        stream = generate(self.at_a, **options)
        await until(lambda: self.worker.running)
        self.worker.step()
        await stream.read()
        return stream

    def step(self, count: int) -> None:
        for _ in range(count):
            self.worker.step()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with ResumableDecode(manual=True) as worker:
        a, b = RouterRig(worker), RouterRig(worker)
        b.tokens = a.tokens
        async with a, b, stub_of(a) as at_a, stub_of(b) as at_b:
            await a.linked()
            await b.linked()
            yield Pair(worker, a, b, at_a, at_b)


async def refused(stream: Stream, kind: type[DiptychError], words: str) -> None:
    with pytest.raises(kind, match=words):
        await stream.read()


async def test_a_token_comes_with_the_metadata_and_the_first_message_only(pair: Pair) -> None:
    stream = generate(pair.at_a, max_tokens=3)
    metadata = dict(await stream.call.initial_metadata())
    (request_id,) = pair.a.loop.live
    ref = WorkerRef(pair.worker.worker_id, pair.worker.epoch)
    claims = Claims(RequestId(request_id), Tenant(""), ref)
    assert pair.b.tokens.read(metadata[RESUME_TOKEN], "") == claims
    await until(lambda: pair.worker.running)
    pair.step(1)
    await stream.read()
    assert pair.b.tokens.read(stream.token, "") == claims
    stream.token = b""
    pair.step(2)
    await stream.read_all()
    assert stream.token == b""


async def test_a_stream_goes_on_at_another_router(pair: Pair) -> None:
    first = await pair.begin()
    pair.step(2)
    second = attach_to(pair.at_b, first.token, 1)
    await second.read()
    assert second.pieces == [Piece(first.pieces[0].request_id, 1, (), "")], "at once, whatever comes"
    assert second.token
    await until(lambda: not pair.a.loop.live)
    pair.step(5)
    await second.read_all()

    assert [*first.pieces[0].tokens, *(t for p in second.pieces for t in p.tokens)] == WHOLE
    assert text_of([first.pieces[0], *second.pieces]) == "".join(f"<{token}>" for token in WHOLE)
    finish = second.pieces[-1].finish
    assert finish
    trail = finish.trail
    assert (finish.reason, trail.seed, trail.num_prompt_tokens, trail.num_output_tokens) == (
        "length",
        7,
        5,
        8,
    )
    assert (trail.num_resumed, trail.fallbacks) == (0, {"router_lost": 1})
    assert (await pair.b.status()).fallbacks == {"router_lost": 1}
    assert pair.worker.cancels == []
    # The older call had a definite end, and its client's going changes nothing.
    await first.read_all()
    assert first.reason == "abort"


@pytest.mark.parametrize("next_index", [0, 1, 3])
async def test_an_older_index_brings_tokens_again(pair: Pair, next_index: int) -> None:
    first = await pair.begin()
    pair.step(2)
    second = attach_to(pair.at_b, first.token, next_index)
    await second.read()
    pair.step(5)
    await second.read_all()
    assert [t for p in second.pieces for t in p.tokens] == WHOLE[next_index:]
    assert next(p.index for p in second.pieces if p.tokens) == next_index


async def test_after_the_router_the_decode_worker_may_die_too() -> None:
    async with ResumableDecode("w0", manual=True) as w0, ResumableDecode("w1") as w1:
        a, b = RouterRig(w0), RouterRig(w0)
        b.tokens = a.tokens
        async with a, b, stub_of(a) as at_a, stub_of(b) as at_b:
            pair = Pair(w0, a, b, at_a, at_b)
            first = await pair.begin()
            pair.step(2)
            await b.linked()
            second = attach_to(at_b, first.token, 1)
            await second.read(2)
            token = second.token
            b.list(w0, w1)
            await b.linked()
            await w0.kill()
            await second.read_all()

            assert WHOLE[:1] + [t for p in second.pieces for t in p.tokens] == WHOLE
            (submit,) = w1.submits
            assert bytes(submit.tokens[:5]) == PROMPT.encode()
            assert (list(submit.tokens[5:]), submit.num_output, submit.placement) == (WHOLE[:3], 3, 2)
            assert submit.params.seed == 7
            finish = second.pieces[-1].finish
            assert finish
            assert finish.trail.num_resumed == 1
            assert finish.trail.fallbacks == {"decode_lost": 1, "router_lost": 1}
            moved = b.tokens.read(second.token, "")
            assert second.token != token
            assert moved.ref.worker_id == "w1", "whoever dies next, the token names who has it"
            a.list()
            await a.at_rest()


async def test_another_call_at_the_same_router_takes_over(pair: Pair) -> None:
    first = await pair.begin()
    second = attach_to(pair.at_a, first.token, 0)
    await second.read()
    await first.read_all()
    assert first.reason == "abort"
    pair.step(7)
    await second.read_all()
    assert tokens_of([p for p in second.pieces if p.tokens]) == WHOLE
    assert pair.worker.cancels == []


async def test_two_calls_that_attach_at_the_same_time_have_an_order(pair: Pair) -> None:
    first = await pair.begin()
    pair.worker.hold_answers = True
    second, third = (attach_to(pair.at_b, first.token, i) for i in (0, 1))
    await until(lambda: pair.worker.attaches)
    pair.worker.release()
    await second.read()
    await third.read()
    pair.step(7)
    found = {name: await stream.read_all() for name, stream in (("second", second), ("third", third))}
    ends = sorted(pieces[-1].finish.reason for pieces in found.values() if pieces[-1].finish)
    assert ends == ["abort", "length"]
    whole = next(p for p in found.values() if p[-1].finish and p[-1].finish.reason == "length")
    assert [t for p in whole for t in p.tokens] == WHOLE[whole[0].index :]


@pytest.mark.parametrize(
    ("token", "next_index", "tenant", "kind", "words"),
    [
        (lambda token: token, 9, "", InvalidField, "next_index: is 9"),
        (lambda token: token, 0, "acme", InvalidField, "resume_token: belongs to another tenant"),
        (lambda token: token[:-1], 0, "", InvalidField, "resume_token: was not given out"),
        (lambda token: b"", 0, "", InvalidField, "resume_token: was not given out"),
    ],
)
@pytest.mark.parametrize("where", ["same", "other"])
async def test_what_is_wrong_is_refused_and_changes_nothing(
    pair: Pair,
    where: str,
    token: Callable[[bytes], bytes],
    next_index: int,
    tenant: str,
    kind: type[DiptychError],
    words: str,
) -> None:
    first = await pair.begin()
    stub = pair.at_a if where == "same" else pair.at_b
    await refused(attach_to(stub, token(first.token), next_index, tenant), kind, words)
    pair.step(7)
    assert tokens_of(await first.read_all()) == WHOLE


async def test_a_worker_that_is_gone_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "UNLISTED_WAIT_S", 0.1)
    first = await pair.begin()
    pair.b.list()
    await until(lambda: not pair.b.loop.policy.usable)
    await refused(attach_to(pair.at_b, first.token, 1), Stale, "decode worker decode-0@.* is gone: ask again")
    pair.step(7)
    await first.read_all()


async def test_a_worker_that_is_not_reached_may_be_later(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "LINK_WAIT_S", 0.1)
    first = await pair.begin()
    await pair.worker.kill()
    await until(lambda: not pair.b.loop.policy.usable)
    await refused(attach_to(pair.at_b, first.token, 1), PeerLost, "was not reached within 0.1 s")
    first.call.cancel()


async def test_a_worker_that_is_lost_meanwhile_may_be_reached_later(pair: Pair) -> None:
    first = await pair.begin()
    pair.worker.hold_answers = True
    second = attach_to(pair.at_b, first.token, 1)
    await until(lambda: pair.worker.attaches)
    await pair.worker.kill()
    await refused(second, PeerLost, "was lost while a call attached")
    first.call.cancel()


@pytest.mark.parametrize("where", ["same", "other"])
async def test_a_client_that_goes_while_it_attaches_ends_the_request(pair: Pair, where: str) -> None:
    first = await pair.begin()
    pair.worker.hold_answers = True
    second = attach_to(pair.at_a if where == "same" else pair.at_b, first.token, 1)
    await until(lambda: pair.worker.attaches)
    second.call.cancel()
    if where == "same":
        await first.read_all()
        assert first.reason == "abort"
        await until(lambda: pair.worker.cancels)
        pair.worker.release()
    else:
        await until(lambda: any(m.startswith("cancel") for m in pair.worker.received))
        pair.worker.release()
        first.call.cancel()


async def test_an_older_call_that_ends_while_another_attaches_cancels_nothing(pair: Pair) -> None:
    first = await pair.begin()
    pair.worker.hold_answers = True
    second = attach_to(pair.at_a, first.token, 1)
    await until(lambda: pair.worker.attaches)
    first.call.cancel()
    await until(lambda: not pair.a.loop.calls)
    pair.worker.release()
    await second.read()
    pair.step(7)
    await second.read_all()
    assert [t for p in second.pieces for t in p.tokens] == WHOLE[1:]
    assert pair.worker.cancels == []


async def test_nothing_is_left_when_both_calls_end_before_the_answer(pair: Pair) -> None:
    first = await pair.begin()
    pair.worker.hold_answers = True
    second = attach_to(pair.at_a, first.token, 9)
    await until(lambda: pair.worker.attaches)
    first.call.cancel()
    await until(lambda: not pair.a.loop.calls)
    pair.worker.release()
    await refused(second, InvalidField, "next_index")
    await until(lambda: pair.worker.cancels)
    await pair.a.at_rest()


async def test_what_has_ended_is_told_again(pair: Pair) -> None:
    first = await pair.begin()
    pair.step(7)
    await until(lambda: pair.worker.acknowledged)
    second = attach_to(pair.at_b, first.token, 5)
    await second.read_all()
    assert [t for p in second.pieces for t in p.tokens] == WHOLE[5:]
    assert second.reason == "length"
    await until(lambda: len(pair.worker.acknowledged) == 2)
    assert (await first.read_all())[-1].finish == first.pieces[-1].finish
    assert first.reason == "length"


async def test_a_request_that_moved_is_found_where_it_is() -> None:
    async with ResumableDecode("w0", manual=True) as w0, ResumableDecode("w1", manual=True) as w1:
        async with RouterRig(w0) as rig, stub_of(rig) as stub:
            first = generate(stub)
            await until(lambda: w0.running)
            w0.step()
            await first.read()
            rig.list(w0, w1)
            await rig.linked()
            await w0.kill()
            await until(lambda: w1.running)
            second = attach_to(stub, first.token, 0)
            await second.read()
            for _ in range(7):
                w1.step()
            await second.read_all()
            assert [t for p in second.pieces for t in p.tokens] == WHOLE


async def test_a_request_between_two_workers_may_be_had_later() -> None:
    async with ResumableDecode("w0", manual=True) as w0, RouterRig(w0) as rig, stub_of(rig) as stub:
        first = generate(stub)
        await until(lambda: w0.running)
        w0.step()
        await first.read()
        await w0.kill()
        await until(lambda: rig.loop.policy.num_queued)
        await refused(attach_to(stub, first.token, 1), PeerLost, "waits for another")
        first.call.cancel()


async def test_who_attached_may_cancel_by_id(pair: Pair) -> None:
    first = await pair.begin(tenant="acme")
    second = attach_to(pair.at_b, first.token, 1, "acme")
    await second.read()
    request_id = second.pieces[0].request_id
    assert not await pair.b.client.cancel(request_id), "another tenant's"
    answer = await pair.at_b.Cancel(router_pb2.CancelRequest(request_id=request_id, tenant="acme"))
    assert answer.found
    await second.read_all()
    assert second.reason == "abort"
    await refused(attach_to(pair.at_b, first.token, 1, "acme"), Stale, "is not here")
