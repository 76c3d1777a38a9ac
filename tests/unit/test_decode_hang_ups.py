"""A peer may hang up at any moment, also while its call is being tidied up: nothing of it stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.domain.ids import Attempt, Epoch, RequestId, WorkerId
from diptych.domain.layout import WIRE_VERSION
from diptych.v1 import decode_pb2
from services.decode.attempts import AttemptStreams
from services.decode.messages import AttemptEnded, DecodeInbox
from services.decode.server import DecodeServicer
from services.decode.sessions import RouterSession

KEY = RequestId("a"), Attempt(1)


class FakeWorker:
    """As much of one as the servicer touches."""

    worker_id, epoch, is_lively = WorkerId("d"), Epoch(7), True

    def __init__(self) -> None:
        self.streams = AttemptStreams()
        self.inbox = DecodeInbox()
        self.sessions: set[RouterSession] = set()
        self.deliveries = SimpleNamespace(counters={})

    def sources_of(self, *_: object) -> frozenset[Any]:
        return frozenset()

    def open_session(self, router_id: str, router_epoch: int, number: int) -> RouterSession:
        session = RouterSession(router_id, router_epoch)
        self.sessions.add(session)
        return session

    def close_session(self, session: RouterSession) -> None:
        self.sessions.discard(session)


class Requests:
    """What a peer says: one message, then nothing, and it takes a while to let go."""

    def __init__(self, first: object) -> None:
        self._first = [first]
        self.let_go = asyncio.Event()
        self.is_letting_go = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._first:
            return self._first.pop()
        try:
            return await asyncio.Event().wait()
        finally:
            self.is_letting_go.set()
            await self.let_go.wait()


async def hung_up_twice(
    call: Callable[[Requests], AsyncIterator[Any]], requests: Requests, begun: Callable[[], Awaitable[None]]
) -> None:
    """Cancels a call, and once more while it is being tidied up for that."""

    async def listen() -> None:
        async for _ in call(requests):
            pass

    serving = asyncio.create_task(listen())
    await begun()
    serving.cancel()
    await requests.is_letting_go.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    requests.let_go.set()


@pytest.mark.parametrize("ended", [False, True], ids=["under way", "ended"])
async def test_a_handoff_stream(ended: bool) -> None:
    worker: Any = FakeWorker()
    worker.streams.begun(KEY)
    opening = decode_pb2.HandoffOpen(request_id="a", attempt=1, decode_epoch=7)

    async def begun() -> None:
        while not worker.streams.num_open:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        if ended:
            worker.streams.attempt_ended(AttemptEnded(*KEY, "cancelled"))

    requests = Requests(decode_pb2.HandoffRequest(open=opening))
    servicer: Any = DecodeServicer(worker)
    await hung_up_twice(lambda said: servicer.Handoff(said, None), requests, begun)
    assert worker.streams.num_open == 0
    assert [failed.kind for failed in worker.inbox.failures] == ([] if ended else ["PeerLost"])


async def test_a_session() -> None:
    worker: Any = FakeWorker()
    hello = decode_pb2.SessionHello(wire_version=WIRE_VERSION, worker_id="d", worker_epoch=7, session=1)

    async def begun() -> None:
        while not worker.sessions:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    requests = Requests(decode_pb2.SessionRequest(hello=hello, sequence=1))
    servicer: Any = DecodeServicer(worker)
    await hung_up_twice(lambda said: servicer.Session(said, None), requests, begun)
    assert worker.sessions == set()
