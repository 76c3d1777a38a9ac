"""One session: the stream that carries all of this router's requests on one decode worker.

    hello ──▶            first, once: wire version, both ends' ids and epochs
          ◀── welcome    the worker is who we meant; requests may be sent
    submit, piece, cancel, attach, acknowledge, heartbeat ──▶
          ◀── deltas     one message a step, with every request's new tokens; without any it is a heartbeat
          ◀── attached, piece, refused     the answer to attach

Both sides count their messages: one that comes again is passed over, and a gap ends the session, so that no
request waits for what was lost. The session itself has a number, so that no old one can be opened anew.

A session ends when the stream does, or when the peer stays silent for `silent_s`: a process that was stopped
closes nothing, and its machine still answers pings. Silence is counted in wake-ups of our own, not by the
clock, so that a router that was itself stopped, or kept busy, does not take its own absence for the peer's.
It ends once: the listener hears `session_lost`, or we closed it and it hears nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

import grpc
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from diptych.domain.errors import CallerError, DiptychError, Internal, LayoutMismatch, PeerLost, Stale
from diptych.domain.ids import RequestId
from diptych.domain.layout import WIRE_VERSION
from diptych.rpc.dial import Dialer
from diptych.rpc.status import domain_errors
from diptych.v1 import decode_pb2
from diptych.v1.decode_pb2_grpc import DecodeStub
from services.router.decisions import Reason, WorkerRef
from services.router.outgoing import Outgoing

log = logging.getLogger(__name__)

Deltas = RepeatedCompositeFieldContainer[decode_pb2.Delta]
ANSWERS: Final = ("attached", "piece", "refused")
"""What answers to `attach`."""
_Call = grpc.aio.StreamStreamCall[decode_pb2.SessionRequest, decode_pb2.SessionResponse]


class SessionListener(Protocol):
    """Who hears what comes down. Called on the event loop; must not block."""

    def session_up(self, session: Session) -> None:
        """The worker welcomed us."""

    def session_deltas(self, session: Session, deltas: Deltas) -> None:
        """One step's new tokens."""

    def session_answer(self, session: Session, answer: decode_pb2.SessionResponse) -> None:
        """Part of what the worker answers to `attach`."""

    def session_lost(self, session: Session, reason: Reason, cause: DiptychError) -> None:
        """The session is over, not by our will; nothing follows."""


class Session:
    """One session, from `start` to its end. Belongs to one event loop."""

    def __init__(
        self,
        ref: WorkerRef,
        address: str,
        dialer: Dialer,
        *,
        router: WorkerRef,
        number: int,
        listener: SessionListener,
        heartbeat_s: float,
        silent_s: float,
    ) -> None:
        """`number` counts the sessions of this start of the router."""
        self.ref = ref
        self.address = address
        self.was_up = False
        """Whether the worker ever welcomed us."""
        self._dialer = dialer
        self._router = router
        self._number = number
        self._listener = listener
        self._heartbeat_s = heartbeat_s
        self._most_quiet = max(2, round(silent_s / heartbeat_s))
        self._silent_s = silent_s
        self._num_quiet = 0
        """Wake-ups of the watch since the peer was last heard."""
        self._outgoing = Outgoing()
        self._num_sent = 0
        self._num_received = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Dials in the background."""
        self._task = asyncio.create_task(self._run(), name=f"session {self.ref}")

    def submit(self, submit: decode_pb2.Submit, tokens: Sequence[int]) -> None:
        """Queues a request: `submit` without tokens, and all its tokens."""
        self._outgoing.submit(submit, tokens)

    def cancel(self, request_id: RequestId) -> bool:
        """Queues a cancel. False: the worker has never heard of the request, and will not."""
        return self._outgoing.cancel(request_id)

    def attach(self, attach: decode_pb2.SessionAttach) -> None:
        """Queues the wish to have a request that runs there; the listener hears the answer."""
        self._outgoing.attach(attach)

    def acknowledge(self, request_id: RequestId) -> None:
        """Queues that nothing of an ended request need be kept."""
        self._outgoing.acknowledge(request_id)

    async def close(self) -> None:
        """Ends the session; the listener hears no more of it. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            reason, cause = await self._talk()
        except Exception as error:  # a task's boundary: a bug of ours must not leave requests waiting
            log.exception("the session with %s failed", self.ref)
            reason, cause = Reason.WORKER_LOST, Internal(f"the session with {self.ref} failed: {error}")
        self._listener.session_lost(self, reason, cause)

    async def _talk(self) -> tuple[Reason, DiptychError]:
        """Until the session ends; says why."""
        call: _Call = DecodeStub(self._dialer.channel(self.address)).Session()  # type: ignore[call-arg]  # asyncio's form
        reader = asyncio.create_task(self._read(call))
        watch = asyncio.create_task(self._watch())
        writer = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait({reader, watch, writer}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not reader.done() and (error := writer.exception()) is not None:
                raise error  # nothing more would go up
            await asyncio.wait({reader, watch}, return_when=asyncio.FIRST_COMPLETED)
            return reader.result() if reader.done() else watch.result()
        finally:
            call.cancel()
            for task in (reader, watch, writer):
                task.cancel()
            await asyncio.wait({reader, watch, writer})

    async def _read(self, call: _Call) -> tuple[Reason, DiptychError]:
        try:
            self._check_welcome(await self._next(call))
            self.was_up = True
            self._listener.session_up(self)
            while True:
                response = await self._next(call)
                if response.deltas:
                    self._listener.session_deltas(self, response.deltas)
                elif any(response.HasField(part) for part in ANSWERS):
                    self._listener.session_answer(self, response)
        except (LayoutMismatch, Stale, CallerError) as error:
            return Reason.WORKER_REFUSED, error
        except DiptychError as error:
            return Reason.WORKER_LOST, error

    async def _next(self, call: _Call) -> decode_pb2.SessionResponse:
        while True:
            with domain_errors():
                response: Any = await call.read()
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
                raise PeerLost(f"{self.ref} ended the session")
            message: decode_pb2.SessionResponse = response
            if self._is_next(message.sequence):
                self._num_quiet = 0
                return message

    def _is_next(self, sequence: int) -> bool:
        """False for a message that came before. Raises PeerLost where one is missing."""
        if sequence > self._num_received + 1:
            raise PeerLost(f"message {sequence} of {self.ref} came where {self._num_received + 1} was next")
        if sequence <= self._num_received:
            log.warning("message %d of %s came again", sequence, self.ref)
            return False
        self._num_received = sequence
        return True

    def _check_welcome(self, response: decode_pb2.SessionResponse) -> None:
        welcome = response.welcome
        if (welcome.worker_id, welcome.worker_epoch) != (self.ref.worker_id, self.ref.epoch):
            raise Stale(f"{welcome.worker_id}@{welcome.worker_epoch:x} answered in place of {self.ref}")

    async def _write(self, call: _Call) -> None:
        hello = decode_pb2.SessionHello(
            wire_version=WIRE_VERSION,
            router_id=self._router.worker_id,
            router_epoch=self._router.epoch,
            worker_id=self.ref.worker_id,
            worker_epoch=self.ref.epoch,
            session=self._number,
        )
        # What fails here fails the reader as well, and it is told there with its cause.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._send(call, decode_pb2.SessionRequest(hello=hello))
            while True:
                await self._send(call, await self._outgoing.take())

    async def _send(self, call: _Call, message: decode_pb2.SessionRequest) -> None:
        self._num_sent += 1
        message.sequence = self._num_sent
        await call.write(message)

    async def _watch(self) -> tuple[Reason, DiptychError]:
        """Sends signs of life, and ends when none comes back."""
        while self._num_quiet < self._most_quiet:
            await asyncio.sleep(self._heartbeat_s)
            self._num_quiet += 1
            self._outgoing.beat()
        return Reason.WORKER_SILENT, PeerLost(f"{self.ref} was silent for {self._silent_s:g} s")
