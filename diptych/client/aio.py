"""The client for an event loop: `Client`'s calls, awaited. See `sync` for what each means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from diptych.client.requests import Message, Options, build_request
from diptych.client.values import ModelInfo, Piece, RouterStatus, read_models, read_piece, read_status
from diptych.domain.errors import PeerLost
from diptych.rpc.dial import Dialer
from diptych.rpc.status import domain_errors
from diptych.rpc.tls import TlsSettings
from diptych.v1 import router_pb2
from diptych.v1.router_pb2_grpc import RouterStub


class AsyncGeneration:
    """The pieces of one answer, as they come. Closing it, or leaving its `async with`, cancels the rest."""

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]
    ) -> None:
        self._call = call
        self._messages = aiter(call)
        self._ended = False
        self.request_id = ""
        """The router's name for the request; empty until the first piece."""

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if self._ended:
            raise StopAsyncIteration
        try:
            with domain_errors():
                message = await anext(self._messages, None)
            if message is None:
                raise PeerLost("the router ended the stream before its last message")
            piece = read_piece(message)
        except BaseException:
            self.close()
            raise
        self.request_id = piece.request_id
        self._ended = piece.finish is not None
        return piece

    def close(self) -> None:
        """Cancels the request everywhere unless it has ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Speaks to one router. Belongs to one event loop; connects at the first call, and again after a loss."""

    def __init__(
        self, address: str, *, tenant: str = "", timeout_s: float = 600.0, tls: TlsSettings | None = None
    ) -> None:
        """As `Client`."""
        self.address = address
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._call_timeout_s = min(timeout_s, 10.0)
        self._dialer = Dialer(tls)
        self._router = RouterStub(self._dialer.channel(address))

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        **options: Unpack[Options],
    ) -> AsyncGeneration:
        """As `Client.generate`; nothing to await before the first piece."""
        request = build_request(prompt, messages, token_ids, options)
        request.model, request.tenant = model, self._tenant
        return AsyncGeneration(self._router.Generate(request, timeout=self._timeout_s))

    async def cancel(self, request_id: str) -> bool:
        """Ends a request of this tenant everywhere. False: no such live request."""
        request = router_pb2.CancelRequest(request_id=request_id, tenant=self._tenant)
        with domain_errors():
            answer = await self._router.Cancel(request, timeout=self._call_timeout_s)
        return answer.found

    async def status(self) -> RouterStatus:
        """The router, its workers and their load."""
        with domain_errors():
            answer = await self._router.Status(router_pb2.StatusRequest(), timeout=self._call_timeout_s)
        return read_status(answer)

    async def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        with domain_errors():
            answer = await self._router.ListModels(
                router_pb2.ListModelsRequest(), timeout=self._call_timeout_s
            )
        return read_models(answer)

    async def close(self) -> None:
        """Ends every call that is under way. Idempotent."""
        await self._dialer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
