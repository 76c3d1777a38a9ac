"""The course of one stream over the routers that it needs, the same for both clients; no I/O.

    message ─▶ take ────────▶ a piece, none yet, or the error that ended the request
    loss ────▶ after_loss ──▶ what to do next, after a pause: attach with the resume token, or ask another
                              router for what the first did not admit; or the error that ends the stream

A router that says why a call ended has not gone: its word is final, but for the few that promise that the
same may succeed elsewhere. Only a call that ends without a word is a loss, and only one with a token can be
made good.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import grpc

from diptych.client.values import Piece, read_piece
from diptych.domain.errors import DeadlineExceeded, DiptychError, Draining, Internal, PeerLost
from diptych.rpc.status import says_why
from diptych.v1 import router_pb2

FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
RESUME_TOKEN: Final = "diptych-resume-token-bin"
"""Key of the initial metadata."""


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
        self._token = b""
        self._next_index = 0
        self._loss: DiptychError | None = None
        """What broke the stream; None while it runs."""
        self._lost_at = 0.0
        self._pause_s = FIRST_PAUSE_S

    def take(self, message: router_pb2.GenerateResponse) -> Piece | None:
        """What a message brings. Raises the error that ended the request, and Internal for a gap or a
        repeat."""
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
        return piece if piece.tokens or piece.text or piece.finish else None

    def learn_from(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """A call's initial metadata, which may bring a token before the first message does."""
        for key, value in metadata:
            if key == RESUME_TOKEN and isinstance(value, bytes) and not self._token:
                self._token = value

    def attach_request(self) -> router_pb2.AttachRequest:
        """What `Attach` is asked for now."""
        return router_pb2.AttachRequest(
            resume_token=self._token, next_index=self._next_index, tenant=self._tenant
        )

    def after_loss(self, error: DiptychError, now: float) -> Again:
        """What to do after a call ended with `error`. Raises what ends the stream, `error` as a rule."""
        if self._loss is not None:
            return self._next_attempt(error, now)
        if isinstance(error, Draining) and self._refusals_left > 0:
            self._refusals_left -= 1
            return Again(0.0, attach=False)
        if not (is_loss(error) and self._token and self._reattach_s):
            raise error
        self._loss, self._lost_at = error, now
        return Again(FIRST_PAUSE_S * random.uniform(0.5, 1.5), attach=True)

    def _next_attempt(self, error: DiptychError, now: float) -> Again:
        if not error.retry or isinstance(error, DeadlineExceeded):
            raise error
        pause_s = self._pause_s * random.uniform(0.5, 1.5)
        if now + pause_s > self._lost_at + self._reattach_s:
            problem = f"no router went on with the request within {self._reattach_s:g} s"
            raise PeerLost(f"{self._loss}; {problem}: {error}") from self._loss
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return Again(pause_s, attach=True)


def is_loss(error: DiptychError) -> bool:
    """Whether a call ended without a router's word."""
    cause = error.__cause__
    return isinstance(error, PeerLost) and not (isinstance(cause, grpc.RpcError) and says_why(cause))
