"""The streams of routers on this worker.

    SessionHello ─▶ welcome     Submit (+ pieces) ─▶ engine     engine step ─▶ one message a session

A session has its requests until it ends; `deliveries` says what becomes of them then. It is ended when its
router goes silent, and when its outgoing queue grows past a bound (the router has stopped reading).

**Nothing counts twice.** A router counts its sessions and, on each, its messages; we count ours. A session
that is not newer than the newest of its router is refused. A message that came before is passed over; one
that comes where another is missing ends the session, for what is missing may be a request that would wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from diptych.domain.errors import InvalidField, LayoutMismatch, Stale
from diptych.domain.ids import Epoch, RequestId, WorkerId
from diptych.domain.layout import WIRE_VERSION
from diptych.v1 import decode_pb2

MAX_QUEUED = 4096
"""Messages that a router may lag behind: a message is a step of the engine."""
MAX_ROUTERS = 1024
"""Starts of routers whose newest session is remembered."""


class RouterSession:
    """One router's stream: what is to be sent, and whose requests they are."""

    def __init__(self, router_id: str, router_epoch: int) -> None:
        self.router = (router_id, router_epoch)
        """This very start of it."""
        self.num_received = 1
        """Messages of the router's, the hello among them."""
        self._num_sent = 0
        self.requests: set[RequestId] = set()
        """Those that have not ended."""
        self._queue: asyncio.Queue[decode_pb2.SessionResponse | None] = asyncio.Queue()
        self._assembly: dict[RequestId, Assembly] = {}

    def send(self, deltas: Iterable[decode_pb2.Delta]) -> None:
        """Queues one step's message. A router that has stopped reading is given up."""
        self.put(decode_pb2.SessionResponse(deltas=deltas))

    def put(self, response: decode_pb2.SessionResponse) -> None:
        """As `send`, for a message of any kind."""
        if self._queue.qsize() >= MAX_QUEUED:
            self.close()
            return
        self._queue.put_nowait(response)

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def next(
        self, idle_s: float, is_lively: Callable[[], bool] = lambda: True
    ) -> decode_pb2.SessionResponse | None:
        """The next message, an empty one after `idle_s` seconds without if `is_lively`; None at the end."""
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    response = await self._queue.get()
                return None if response is None else self.numbered(response)
            except TimeoutError:
                if is_lively():
                    return self.numbered(decode_pb2.SessionResponse())

    def numbered(self, response: decode_pb2.SessionResponse) -> decode_pb2.SessionResponse:
        """The same, with the number under which it is sent now."""
        self._num_sent += 1
        response.sequence = self._num_sent
        return response

    def is_next(self, sequence: int) -> bool:
        """Takes a message of the router's: False where it came before. Raises Stale where one is missing."""
        if sequence > self.num_received + 1:
            raise Stale(f"message {sequence} of the session came where {self.num_received + 1} was next")
        if sequence <= self.num_received:
            return False
        self.num_received = sequence
        return True

    def assemble(self, submit: decode_pb2.Submit) -> Assembly | None:
        """A new request; the assembly when all its tokens are here already."""
        request_id = RequestId(submit.request_id)
        if not request_id:
            raise InvalidField("request_id", "is empty")
        assembly = Assembly(submit, list(submit.tokens))
        self._assembly[request_id] = assembly
        return self._whole(request_id)

    def add_piece(self, piece: decode_pb2.PromptPiece) -> Assembly | None:
        """More tokens of a request; the assembly when it is whole. Pieces of unknown requests are dropped:
        they were cancelled meanwhile."""
        request_id = RequestId(piece.request_id)
        assembly = self._assembly.get(request_id)
        if assembly is None:
            return None
        if piece.offset != len(assembly.tokens):
            raise InvalidField("piece.offset", f"is {piece.offset}, {len(assembly.tokens)} comes next")
        assembly.tokens.extend(piece.tokens)
        return self._whole(request_id)

    def drop_assembly(self, request_id: RequestId) -> Assembly | None:
        """Forgets an unfinished submission."""
        return self._assembly.pop(request_id, None)

    def _whole(self, request_id: RequestId) -> Assembly | None:
        assembly = self._assembly[request_id]
        if len(assembly.tokens) < assembly.submit.num_tokens:
            return None
        del self._assembly[request_id]
        return assembly


class SessionNumbers:
    """The newest session of each start of a router that we know."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[str, int], int] = OrderedDict()

    def take(self, router: tuple[str, int], number: int) -> None:
        """Raises Stale for a session that is not newer than the newest."""
        newest = self._newest.get(router, 0)
        if number <= newest:
            raise Stale(f"session {number} of router {router[0]} is over: {newest} came since")
        self._newest[router] = number
        self._newest.move_to_end(router)
        while len(self._newest) > MAX_ROUTERS:
            self._newest.popitem(last=False)


@dataclass(slots=True)
class Assembly:
    """A submission whose prompt comes in pieces."""

    submit: decode_pb2.Submit
    tokens: list[int] = field(default_factory=list)


def check_hello(
    message: decode_pb2.SessionRequest, worker_id: WorkerId, epoch: Epoch
) -> decode_pb2.SessionHello:
    """The first message of a session. Raises LayoutMismatch, Stale or InvalidField."""
    if message.WhichOneof("body") != "hello" or message.sequence != 1:
        raise InvalidField("hello", "must be the first message of a session")
    hello = message.hello
    if hello.wire_version != WIRE_VERSION:
        raise LayoutMismatch(f"wire version {hello.wire_version}, ours is {WIRE_VERSION}")
    if hello.worker_id != worker_id or hello.worker_epoch != epoch:
        raise Stale(f"{hello.worker_id}@{hello.worker_epoch} is not this process")
    return hello
