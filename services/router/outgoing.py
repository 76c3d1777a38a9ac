"""What goes up one session, in which order: cancels and heartbeats first, then prompts, a piece of each in
turn.

A long prompt is cut into pieces, so that a cancel waits for one message at most and a short prompt for one
piece of each long one. The queue holds no message of a prompt before its turn: it is cut as it is sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from diptych.domain.ids import RequestId
from diptych.rpc.failpoint import failpoint
from diptych.v1 import decode_pb2

PIECE_TOKENS: Final = 4096
"""Most token ids in one message: 20 KiB at most."""


@dataclass(slots=True)
class _Prompt:
    messages: Iterator[decode_pb2.SessionRequest]
    begun: bool = False


class Outgoing:
    """One session's queue. Belongs to one event loop; one task takes from it."""

    def __init__(self) -> None:
        self._urgent: deque[decode_pb2.SessionRequest] = deque()
        self._prompts: dict[RequestId, _Prompt] = {}
        self._filled = asyncio.Event()

    def submit(self, submit: decode_pb2.Submit, tokens: Sequence[int]) -> None:
        """Queues a request; `submit` comes without its `tokens`, which the pieces bring."""
        self._prompts[RequestId(submit.request_id)] = _Prompt(_cut(submit, tokens))
        self._filled.set()

    def cancel(self, request_id: RequestId) -> bool:
        """Queues a cancel ahead of everything. False: nothing of the request was sent, and nothing will
        be."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None and not prompt.begun:
            return False
        cancel = decode_pb2.SessionCancel(request_id=request_id)
        self._urgent.append(decode_pb2.SessionRequest(cancel=cancel))
        self._filled.set()
        return True

    def attach(self, attach: decode_pb2.SessionAttach) -> None:
        """Queues the wish to have a request that runs there."""
        self._urgent.append(decode_pb2.SessionRequest(attach=attach))
        self._filled.set()

    def acknowledge(self, request_id: RequestId) -> None:
        """Queues that a request's last word has arrived where it should."""
        acknowledge = decode_pb2.SessionAcknowledge(request_id=request_id)
        self._urgent.append(decode_pb2.SessionRequest(acknowledge=acknowledge))
        self._filled.set()

    def beat(self) -> None:
        """Queues a sign of life, unless something waits to be sent, which is one as well."""
        if not self._urgent and not self._prompts:
            self._urgent.append(decode_pb2.SessionRequest(heartbeat=decode_pb2.Heartbeat()))
            self._filled.set()

    async def take(self) -> decode_pb2.SessionRequest:
        """The next message; waits for one."""
        while True:
            if self._urgent:
                return self._urgent.popleft()
            if self._prompts:
                message = self._next_piece()
                if message is not None:
                    return message
                continue
            self._filled.clear()
            await self._filled.wait()

    def _next_piece(self) -> decode_pb2.SessionRequest | None:
        """The next piece of the prompt whose turn it is; None, and it leaves, when it has no more."""
        request_id = next(iter(self._prompts))
        prompt = self._prompts.pop(request_id)
        message = next(prompt.messages, None)
        if message is not None:
            prompt.begun = True
            self._prompts[request_id] = prompt
        return message


def _cut(submit: decode_pb2.Submit, tokens: Sequence[int]) -> Iterator[decode_pb2.SessionRequest]:
    submit.num_tokens = len(tokens)
    submit.tokens.extend(tokens[:PIECE_TOKENS])
    failpoint("router.submit")
    yield decode_pb2.SessionRequest(submit=submit)
    for offset in range(PIECE_TOKENS, len(tokens), PIECE_TOKENS):
        piece = decode_pb2.PromptPiece(
            request_id=submit.request_id, offset=offset, tokens=tokens[offset : offset + PIECE_TOKENS]
        )
        yield decode_pb2.SessionRequest(piece=piece)
