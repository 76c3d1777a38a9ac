"""What each request of this worker has put out, and which session is to hear it.

    submitted ──▶ running ──────────── last word ───────────▶ ended
                    │ ▲                                       │ ▲
      session broke │ │ attached     session broke, or all of │ │ attached
                    ▼ │                   it was acknowledged ▼ │
                  detached ─────────── last word ──────────▶ detached ── `grace_s` ──▶ gone
                    └── `grace_s`, or given up ──▶ cancelled ── last word ──▶ gone

A router may die at any moment, and its clients go to another: so a broken session cancels nothing at once,
and what has ended is kept until its router has given all of it to the network, and then for as long as a
client takes to come back whose network lost it with the router. Somebody who attaches gets what came from the
index that he names, and then what comes. The newest attachment wins: by the caller's own count, since a
router that was stopped brings an old one late.

A router has one session with us at a time. When one that we know opens another, it lives, and has placed
anew what it had on the one before: that is cancelled. A request that comes back while its cancelled self is
still with the engine waits for that one's last word, because the engine's words name the request only.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from diptych.domain.errors import Cancelled, DiptychError, Stale
from diptych.domain.ids import RequestId
from diptych.rpc.failpoint import failpoint
from diptych.v1 import common_pb2, decode_pb2
from services.decode.outputs import Output
from services.decode.sessions import Assembly, RouterSession

ACKNOWLEDGE_S: Final = 300.0
"""Most seconds that an ended request is kept for a session that lives: it acknowledges, or it has a bug."""

PIECE_TOKENS: Final = 4096
"""Most token ids of a prompt in one message."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One request."""

    submit: decode_pb2.Submit
    """Without its tokens."""
    prompt: array[int]
    output: Output
    session: RouterSession | None
    """Who hears of it; None: nobody."""
    router: tuple[str, int]
    """The start of a router that had it last."""
    since: float
    """When it came."""
    until: float = math.inf
    """When it is given up."""
    unwanted: bool = field(default=False, init=False)
    """Cancelled; the engine has not confirmed yet."""
    turn: int = field(default=0, init=False)
    """The latest of its caller's attachments that was served."""

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.submit.request_id)

    @property
    def is_running(self) -> bool:
        return self.output.finish is None

    def attached(self, next_index: int) -> Iterator[decode_pb2.SessionResponse]:
        """The request as another worker would have to be told, in pieces."""
        tokens = self.prompt + self.output.tokens[:next_index]
        submit = decode_pb2.Submit(
            num_tokens=len(tokens), num_output=next_index, tokens=tokens[:PIECE_TOKENS]
        )
        submit.MergeFrom(self.submit)
        yield decode_pb2.SessionResponse(attached=submit)
        for offset in range(PIECE_TOKENS, len(tokens), PIECE_TOKENS):
            piece = decode_pb2.PromptPiece(
                request_id=submit.request_id, offset=offset, tokens=tokens[offset : offset + PIECE_TOKENS]
            )
            yield decode_pb2.SessionResponse(piece=piece)


class Deliveries:
    """All of them. Belongs to one event loop. `cancel` asks the engine to end a request."""

    def __init__(
        self, grace_s: float, cancel: Callable[[RequestId], None], clock: Callable[[], float]
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._grace_s = grace_s
        self._cancel = cancel
        self._clock = clock
        self._all: dict[RequestId, Delivery] = {}
        self._waiting: dict[RequestId, tuple[RouterSession, Assembly]] = {}
        """Requests that came back before their cancelled selves had ended."""

    @property
    def num_running(self) -> int:
        """Requests that the engine has."""
        return sum(delivery.is_running for delivery in self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self._all.values())

    def get(self, request_id: RequestId) -> Delivery | None:
        return self._all.get(request_id)

    def add(self, session: RouterSession, whole: Assembly, output: Output) -> None:
        """A request was given to the engine."""
        submit = decode_pb2.Submit()
        submit.CopyFrom(whole.submit)
        submit.ClearField("tokens")
        submit.ClearField("num_tokens")
        num_prompt = len(whole.tokens) - submit.num_output
        submit.ClearField("num_output")
        prompt = array("I", whole.tokens[:num_prompt])
        delivery = Delivery(submit, prompt, output, session, session.router, self._clock())
        self._all[delivery.request_id] = delivery
        session.requests.add(delivery.request_id)

    def must_wait(self, session: RouterSession, whole: Assembly) -> bool:
        """Whether a submission was put off until its cancelled self has ended. Raises Stale where the request
        is wanted already."""
        request_id = RequestId(whole.submit.request_id)
        before = self._all.get(request_id)
        if before is None:
            return False
        if not before.is_running:
            del self._all[request_id]  # the router never heard its last word, or it would not ask again
            return False
        if not before.unwanted:
            raise Stale(f"{request_id} is here already")
        self._waiting[request_id] = (session, whole)
        return True

    def ended(self, delivery: Delivery) -> list[tuple[RouterSession, Assembly]]:
        """The engine has said its last word, and the output has it. Gives what waited for that: one, or
        none."""
        if delivery.session is not None:
            delivery.session.requests.discard(delivery.request_id)
        delivery.until = self._clock() + (ACKNOWLEDGE_S if delivery.session else self._grace_s)
        if delivery.unwanted:
            del self._all[delivery.request_id]
        waited = self._waiting.pop(delivery.request_id, None)
        return [] if waited is None else [waited]

    def acknowledge(self, session: RouterSession, request_id: RequestId) -> None:
        """All of it was sent. Nothing happens where the session has it no more, or it has not ended."""
        delivery = self._all.get(request_id)
        if delivery is not None and delivery.session is session and not delivery.is_running:
            delivery.session, delivery.until = None, self._clock() + self._grace_s

    def forget_waiting(self, session: RouterSession, request_id: RequestId) -> bool:
        """Its caller gave up a submission that was put off. Whether there was one."""
        waits = self._waiting.get(request_id)
        if waits is None or waits[0] is not session:
            return False
        del self._waiting[request_id]
        return True

    def cancel(self, session: RouterSession, request_id: RequestId) -> None:
        """Its caller gave it up. Nothing happens where the session has it no more. One that ended before the
        cancel came will never be acknowledged: nobody wants it."""
        delivery = self._all.get(request_id)
        if delivery is None or delivery.session is not session:
            return
        if delivery.is_running:
            self._end(delivery)
        else:
            del self._all[request_id]

    def attach(self, session: RouterSession, message: decode_pb2.SessionAttach) -> None:
        """Hands a request over to `session`, or refuses."""
        failpoint("decode.attach")
        request_id = RequestId(message.request_id)
        try:
            delivery = self._wanted(request_id, message.tenant)
            if 0 < message.turn < delivery.turn:
                raise Stale(f"a later call has attached to {request_id}")
            replayed = delivery.output.replay(request_id, message.next_index)
        except DiptychError as error:
            session.put(decode_pb2.SessionResponse(refused=_refusal(request_id, error)))
            return
        delivery.turn = max(delivery.turn, message.turn)
        before, delivery.session, delivery.router = delivery.session, session, session.router
        if before is not None and before is not session:
            before.requests.discard(request_id)
            before.send([superseded(request_id, len(delivery.output.tokens))])
        if delivery.is_running:
            session.requests.add(request_id)
        delivery.until = math.inf if delivery.is_running else self._clock() + ACKNOWLEDGE_S
        self.counters["attached"] += 1
        for response in delivery.attached(message.next_index):
            session.put(response)
        for delta in replayed:
            session.send([delta])

    def detach(self, session: RouterSession) -> None:
        """The session broke, or was ended from here."""
        for request_id, (waiting, _) in list(self._waiting.items()):
            if waiting is session:
                del self._waiting[request_id]
        now = self._clock()
        for delivery in self._all.values():
            if delivery.session is session:
                delivery.session, delivery.until = None, now + self._grace_s
                self.counters["detached"] += delivery.is_running and not delivery.unwanted
        session.requests.clear()
        self.expire()

    def give_up(self, router: tuple[str, int]) -> None:
        """That router opens another session. What has ended stays: its last word may still be wanted."""
        for delivery in self._all.values():
            if delivery.router == router and delivery.session is None and delivery.is_running:
                self._end(delivery)

    def expire(self) -> None:
        """Gives up those for whom nobody came in time."""
        now = self._clock()
        for delivery in [d for d in self._all.values() if d.until <= now]:
            if delivery.is_running:
                delivery.until = math.inf
                self.counters["detached_expired"] += not delivery.unwanted
                self._end(delivery)
            else:
                del self._all[delivery.request_id]

    def _end(self, delivery: Delivery) -> None:
        if not delivery.unwanted:
            delivery.unwanted = True
            self._cancel(delivery.request_id)

    def _wanted(self, request_id: RequestId, tenant: str) -> Delivery:
        delivery = self._all.get(request_id)
        if delivery is None or delivery.submit.tenant != tenant:
            raise Stale(f"{request_id} is not here, or not any more")
        if delivery.unwanted:
            raise Cancelled(f"{request_id} was cancelled")
        return delivery


def superseded(request_id: RequestId, index: int) -> decode_pb2.Delta:
    """The last that the session hears which had a request before another attached to it."""
    failure = common_pb2.Failure(kind="Cancelled", message="superseded: another call has attached to it")
    finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_ABORT, failure=failure)
    return decode_pb2.Delta(request_id=request_id, index=index, finish=finish)


def _refusal(request_id: RequestId, error: DiptychError) -> decode_pb2.AttachRefused:
    failure = common_pb2.Failure(kind=type(error).__name__, message=str(error), retry=error.retry)
    return decode_pb2.AttachRefused(request_id=request_id, failure=failure)
