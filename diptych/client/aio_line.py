"""`line` for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from diptych.client.course import HEARTBEAT_S, silence
from diptych.domain.errors import PeerLost
from diptych.rpc.status import domain_errors
from diptych.v1 import router_pb2

Call = (
    grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]
    | grpc.aio.UnaryStreamCall[router_pb2.AttachRequest, router_pb2.GenerateResponse]
)


class AsyncLine:
    """Messages of one call. Belongs to one event loop."""

    def __init__(self, address: str, call: Call) -> None:
        self.address = address
        self._call = call
        self._reading: asyncio.Task[Any] | None = None
        """A read that went on when its caller had lost patience: cancelled, it would end the call."""
        self._has_ended = False

    async def next(self, patience: int) -> router_pb2.GenerateResponse:
        """The next message. Raises what ended the call, and PeerLost where nothing comes for `patience`
        heartbeats; the call is then as it was."""
        reading = self._reading = self._reading or self._begin_to_read()
        for _ in range(patience):
            if (await asyncio.wait({reading}, timeout=HEARTBEAT_S))[0]:
                break
        else:
            raise silence(self.address, patience)
        self._reading = None
        self._has_ended = True
        with domain_errors():
            message = reading.result()
        if not isinstance(message, router_pb2.GenerateResponse):
            raise PeerLost("the router ended the stream before its last message")
        self._has_ended = False
        return message

    async def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What a call that has ended was told at its begin; of another it can't be known without waiting."""
        return await self._call.initial_metadata() if self._has_ended else ()

    def cancel(self) -> None:
        """Ends the call. Idempotent."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()

    def _begin_to_read(self) -> asyncio.Task[Any]:
        reading = asyncio.create_task(self._read(), name="read router")
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may have no reader
        return reading

    async def _read(self) -> Any:
        return await self._call.read()
