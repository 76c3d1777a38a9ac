"""The course of one stream over the routers that it needs, the same for both clients; no I/O.

    message ─▶ take ────────▶ a piece, none yet, or the error that ended the request
    loss ────▶ after_loss ──▶ what to do next, after a pause: attach with the resume token, or ask another
                              router for what the first did not admit; or the error that ends the stream

A router that says why a call ended has not gone: its word is final, but for the few that promise that the
same may succeed elsewhere. Only a call that ends without a word is a loss, and one that falls silent: each
asks for a message every `HEARTBEAT_S` at least. A lost call is made good with its token, or, while there is
no output, by asking anew: what the first router may have made of it ends when that call is given up.

A call that fell silent is given up only when a later one speaks: closed before, it would tell a router that
was merely busy to end the request. Since such a router may also come to a call of ours when it is late, calls
are counted (`turn`), and the latest counts. Patience doubles with each silence: a system that is slow because
it has too much to do must not get more to do.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import grpc

from diptych.client.values import Piece, read_piece
from diptych.domain.errors import DeadlineExceeded, DiptychError, Draining, Internal, PeerLost, Stale
from diptych.rpc.status import never_connected, says_why
from diptych.v1 import router_pb2

FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
RESUME_TOKEN: Final = "diptych-resume-token-bin"
"""Key of the initial metadata."""

HEARTBEAT_S: Final = 0.25
"""Longest time without a message that routers are asked for."""
FIRST_PATIENCE: Final = 5
"""So many heartbeats without a message are silence, the first time."""
MAX_PATIENCE: Final = 40


@dataclass(frozen=True, slots=True)
class Again:
    """Call again after `pause_s`: `Attach`, or else `Generate` as the first time."""

    pause_s: float
    attach: bool


class Course:
    """Where one stream stands. `reattach_s`: most seconds from a loss to the next message."""

    def __init__(self, tenant: str, num_routers: int, reattach_s: float) -> None:
        self.request_id = ""
        self.num_reattached = 0
        self._tenant = tenant
        self._reattach_s = reattach_s
        self._refusals_left = num_routers - 1
        self._has_begun = False
        """A router has taken the request in."""
        self._num_turns = 0
        self._num_silences = 0
        self._token = b""
        self._next_index = 0
        self._has_output = False
        """The caller has some of it: what is asked anew may be other output."""
        self._loss: DiptychError | None = None
        """What broke the stream; None while it runs."""
        self._lost_at = 0.0
        self._pause_s = FIRST_PAUSE_S

    def take(self, message: router_pb2.GenerateResponse) -> Piece | None:
        """What a message brings; None: nothing for the caller. Raises the error that ended the request, and
        Internal for a gap or a repeat."""
        if not message.request_id:
            return None  # the router lives, and has not taken the request in yet
        self._has_begun = True
        if self._loss is not None:
            self._loss, self._pause_s = None, FIRST_PAUSE_S
            self.num_reattached += 1
        self._refusals_left = 0
        self._token = message.resume_token or self._token
        self.request_id = message.request_id
        piece = read_piece(message)
        if piece.tokens and piece.index != self._next_index:
            raise Internal(f"the router sent output {piece.index} where {self._next_index} was next")
        self._next_index += len(piece.tokens)
        if not (piece.tokens or piece.text or piece.finish):
            return None
        self._has_output = True
        return piece

    def learn_from(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """A call's initial metadata, which may bring a token before the first message does."""
        for key, value in metadata:
            if key == RESUME_TOKEN and isinstance(value, bytes) and not self._token:
                self._token = value

    @property
    def patience(self) -> int:
        """So many heartbeats without a message are silence."""
        if not self._reattach_s:  # where a false alarm could not be made good
            return MAX_PATIENCE
        return min(FIRST_PATIENCE << min(self._num_silences, 8), MAX_PATIENCE)

    def attach_request(self) -> router_pb2.AttachRequest:
        """What `Attach` is asked for now. Each is one turn."""
        self._num_turns += 1
        return router_pb2.AttachRequest(
            resume_token=self._token,
            next_index=self._next_index,
            tenant=self._tenant,
            heartbeat_s=HEARTBEAT_S,
            turn=self._num_turns,
        )

    def after_loss(self, error: DiptychError, now: float) -> Again:
        """What to do after a call ended, or fell silent, with `error`. Raises what ends the stream, `error`
        as a rule."""
        self._num_silences += isinstance(error, Silent)
        if self._loss is not None:
            return self._next_attempt(error, now)
        is_elsewhere = isinstance(error, Draining) or not was_reached(error)
        if is_elsewhere and self._refusals_left > 0:
            self._refusals_left -= 1
            return Again(0.0, attach=False)
        can_be_made_good = self._token or (not self._has_begun and was_reached(error))
        if not (is_loss(error) and can_be_made_good and self._reattach_s):
            raise error
        self._loss, self._lost_at = error, now
        return Again(FIRST_PAUSE_S * random.uniform(0.5, 1.5), attach=bool(self._token))

    def _next_attempt(self, error: DiptychError, now: float) -> Again:
        if isinstance(error, Stale) and self._token and not self._has_output:
            self._token = b""  # the router was lost before the worker had heard of the request
            return Again(0.0, attach=False)
        if not error.retry or isinstance(error, DeadlineExceeded):
            raise error
        if not (self._token or is_loss(error) or isinstance(error, Draining)):
            raise error  # asked anew, it has its answer
        pause_s = self._pause_s * random.uniform(0.5, 1.5)
        if now + pause_s > self._lost_at + self._reattach_s:
            problem = f"no router went on with the request within {self._reattach_s:g} s"
            raise PeerLost(f"{self._loss}; {problem}: {error}") from self._loss
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return Again(pause_s, attach=bool(self._token))


class Silent(PeerLost):
    """A call whose router says nothing, not even that it lives."""


def silence(address: str, patience: int) -> Silent:
    """The error for a call on which nothing came for so many heartbeats."""
    return Silent(f"the router at {address} said nothing for {patience * HEARTBEAT_S:g} s")


def is_loss(error: DiptychError) -> bool:
    """Whether a call ended without a router's word."""
    cause = error.__cause__
    return isinstance(error, PeerLost) and not (isinstance(cause, grpc.RpcError) and says_why(cause))


def was_reached(error: DiptychError) -> bool:
    """Whether there was anybody at the other end of a call that ended so."""
    cause = error.__cause__
    return not (isinstance(cause, grpc.RpcError) and never_connected(cause))
