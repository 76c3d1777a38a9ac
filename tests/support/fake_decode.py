"""A decode worker of real gRPC, whose tokens follow a rule that a test can check.

The next token is a function of all tokens before it, prompt and output, so that a request that moves to
another worker goes on as if nothing had happened, and any token lost, repeated or out of place changes all
that follow:

    expected_output(prompt, n)  ==  what a client must get, whatever happened on the way

By default a request gets a token each step, and a step is made as soon as the last one was sent. With
`manual=True` a test calls `step`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc

from diptych.domain.errors import DiptychError, Stale
from diptych.domain.ids import Cell, Epoch, WorkerId
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.records import Role, WorkerLoad, WorkerRecord
from diptych.rpc.server import RpcServer, serve
from diptych.rpc.tls import TlsSettings
from diptych.store.membership import new_epoch
from diptych.v1 import common_pb2, decode_pb2
from diptych.v1.decode_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server

DEADLINE_S = 20.0


def next_token(tokens: Sequence[int]) -> int:
    """A byte that depends on every token before it."""
    return hashlib.blake2b(repr(list(tokens)).encode(), digest_size=1).digest()[0]


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Waits for a condition; fails after a generous time."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never came about: {what or condition}") from None


@dataclass
class Running:
    """A request as the worker has it. `tokens`: prompt and output."""

    submit: decode_pb2.Submit
    tokens: list[int]
    session: FakeSession

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) >= self.submit.num_tokens

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.submit.num_tokens + self.submit.num_output


@dataclass(eq=False)
class FakeSession:
    """One router's stream."""

    hello: decode_pb2.SessionHello
    num_sent: int = 0
    numbers: list[int] = field(default_factory=list)
    """Of the messages that came up."""
    outbox: asyncio.Queue[decode_pb2.SessionResponse | None] = field(default_factory=asyncio.Queue)
    heartbeats: int = 0

    def numbered(self, response: decode_pb2.SessionResponse) -> decode_pb2.SessionResponse:
        self.num_sent += 1
        response.sequence = self.num_sent
        return response


class FakeDecode(DecodeServicer):
    """Serves on a free port while entered."""

    def __init__(
        self,
        worker_id: str = "decode-0",
        *,
        manual: bool = False,
        capacity_tokens: int = 100_000,
        max_context: int = 8192,
        text_of: Callable[[int], str] = lambda token: f"<{token}>",
        heartbeat_s: float = 0.05,
        step_s: float = 0.0,
        tls: TlsSettings | None = None,
    ) -> None:
        self.worker_id = WorkerId(worker_id)
        self.epoch: Epoch = new_epoch()
        self.welcome_epoch: Epoch | None = None
        """What it says it is, where that is not the truth."""
        self.manual = manual
        self.capacity_tokens = capacity_tokens
        self.max_context = max_context
        self.load = WorkerLoad()
        self.refuse_sessions: DiptychError | None = None
        self.refuse_submits: DiptychError | None = None
        self.deaf = False
        """Takes cancels without an answer."""
        self.frozen = False
        """As a process that was stopped: says nothing, and its streams stay open."""
        self.running: dict[str, Running] = {}
        self.received: list[str] = []
        """Every message that came up, as "kind request_id", hellos and heartbeats left out."""
        self.submits: list[decode_pb2.Submit] = []
        self.cancels: list[str] = []
        self.sessions: list[FakeSession] = []
        self.num_sessions = 0
        self.address = "127.0.0.1:0"
        self._text_of = text_of
        self._heartbeat_s = heartbeat_s
        self._step_s = step_s
        self._tls = tls
        self._server: RpcServer | None = None

    @property
    def record(self) -> WorkerRecord:
        """As it would stand in the registry."""
        return WorkerRecord(
            self.worker_id, Role.DECODE, self.epoch, Cell("main"), "toy", "fake", self.address,
            capacity_tokens=self.capacity_tokens, max_context=self.max_context, load=self.load,
        )  # fmt: skip

    def step(self) -> None:
        """One token for each request whose prompt is whole, in one message a session."""
        by_session: dict[FakeSession, list[decode_pb2.Delta]] = {}
        for request_id, running in list(self.running.items()):
            if running.is_whole:
                by_session.setdefault(running.session, []).append(self._delta(request_id, running))
        for session, deltas in by_session.items():
            self.send(session, *deltas)

    def send(self, session: FakeSession, *deltas: decode_pb2.Delta) -> None:
        """Sends what the rule would not."""
        session.outbox.put_nowait(decode_pb2.SessionResponse(deltas=deltas))

    def finish(self, request_id: str, reason: int, failure: common_pb2.Failure | None = None) -> None:
        """Ends a request now."""
        running = self.running.pop(request_id)
        finish = common_pb2.Finish(
            reason=common_pb2.FinishReason.ValueType(reason),
            failure=failure,
            trail=common_pb2.Trail(decode_worker=self.worker_id, path=common_pb2.PREFILL_PATH_LOCAL),
        )
        delta = decode_pb2.Delta(request_id=request_id, index=running.num_output, finish=finish)
        self.send(running.session, delta)

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        self.num_sessions += 1
        if self.refuse_sessions:
            raise self.refuse_sessions
        first = await anext(aiter(request_iterator))
        hello = first.hello
        assert hello.wire_version == WIRE_VERSION
        if (hello.worker_id, hello.worker_epoch) != (self.worker_id, self.epoch):
            raise Stale("not this process")
        session = FakeSession(hello, numbers=[first.sequence])
        self.sessions.append(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            epoch = self.epoch if self.welcome_epoch is None else self.welcome_epoch
            welcome = decode_pb2.SessionWelcome(worker_id=self.worker_id, worker_epoch=epoch)
            yield session.numbered(decode_pb2.SessionResponse(welcome=welcome))
            while True:
                response = await self._next(session)
                if response is None:
                    return
                if not self.frozen:
                    yield session.numbered(response)
        finally:
            reader.cancel()
            self.sessions.remove(session)
            self._forget(session)

    async def Begin(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def Handoff(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def kill(self) -> None:
        """Ends every stream at once, in mid-word, and stops listening."""
        server, self._server = self._server, None
        if server is not None:
            self.frozen = True
            await server.drain(0)

    async def restart(self) -> None:
        """Another start of the same worker, at the same address."""
        await self.kill()
        self.frozen, self.epoch = False, new_epoch()
        await self._serve(self.address)

    async def __aenter__(self) -> Self:
        await self._serve("127.0.0.1:0")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def _serve(self, address: str) -> None:
        registration = partial(add_DecodeServicer_to_server, self)
        self._server = await serve([registration], address=address, tls=self._tls)
        self.address = self._server.address

    def _forget(self, session: FakeSession) -> None:
        """A session is over: so are its requests."""
        gone = [name for name, running in self.running.items() if running.session is session]
        for name in gone:
            del self.running[name]

    async def _next(self, session: FakeSession) -> decode_pb2.SessionResponse | None:
        """What a test or a step has to say; a step of its own in between; a heartbeat when there is
        nothing."""
        if not self.manual and not self.frozen and session.outbox.empty():
            await asyncio.sleep(self._step_s)
            self.step()
        try:
            async with asyncio.timeout(self._heartbeat_s):
                return await session.outbox.get()
        except TimeoutError:
            return decode_pb2.SessionResponse()

    async def _read(self, session: FakeSession, requests: AsyncIterator[decode_pb2.SessionRequest]) -> None:
        try:
            async for request in requests:
                session.numbers.append(request.sequence)
                self._take(session, request)
        except grpc.RpcError:
            pass

    def _take(self, session: FakeSession, request: decode_pb2.SessionRequest) -> None:
        kind = request.WhichOneof("body")
        if kind == "heartbeat":
            session.heartbeats += 1
        elif kind == "submit":
            self._submitted(session, request.submit)
        elif kind == "piece":
            self.received.append(f"piece {request.piece.request_id}")
            running = self.running.get(request.piece.request_id)
            if running is not None:
                assert request.piece.offset == len(running.tokens), "a piece is missing"
                running.tokens.extend(request.piece.tokens)
        elif kind == "cancel":
            self.received.append(f"cancel {request.cancel.request_id}")
            self.cancels.append(request.cancel.request_id)
            if request.cancel.request_id in self.running and not self.deaf:
                self.finish(request.cancel.request_id, common_pb2.FINISH_REASON_ABORT)

    def _submitted(self, session: FakeSession, submit: decode_pb2.Submit) -> None:
        self.received.append(f"submit {submit.request_id}")
        self.submits.append(submit)
        assert submit.request_id not in self.running, "submitted twice"
        self.running[submit.request_id] = Running(submit, list(submit.tokens), session)
        if self.refuse_submits:
            error = self.refuse_submits
            failure = common_pb2.Failure(kind=type(error).__name__, message=str(error), retry=error.retry)
            self.finish(submit.request_id, common_pb2.FINISH_REASON_ERROR, failure)

    def _delta(self, request_id: str, running: Running) -> decode_pb2.Delta:
        index = running.num_output
        token = next_token(running.tokens)
        running.tokens.append(token)
        delta = decode_pb2.Delta(
            request_id=request_id, index=index, tokens=[token], text=self._text_of(token)
        )
        if running.num_output >= running.submit.params.max_tokens:
            del self.running[request_id]
            delta.finish.reason = common_pb2.FINISH_REASON_LENGTH
            delta.finish.trail.decode_worker = self.worker_id
        return delta
