"""The client for an event loop: `Client`'s calls, awaited. See `sync` for what each means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from diptych.client.aio_line import AsyncLine
from diptych.client.aio_routers import AsyncRouters
from diptych.client.course import HEARTBEAT_S, Course
from diptych.client.requests import Message, Options, build_request
from diptych.client.values import ModelInfo, Piece, RouterStatus, read_models, read_status
from diptych.domain.errors import DiptychError
from diptych.rpc.tls import TlsSettings
from diptych.v1 import router_pb2

if TYPE_CHECKING:
    from diptych.v1.router_pb2_grpc import RouterAsyncStub


class AsyncGeneration:
    """The pieces of one answer, as they come. Closing it, or leaving its `async with`, cancels the rest.

    It outlives its router as `Generation` does.
    """

    def __init__(
        self, routers: AsyncRouters, request: router_pb2.GenerateRequest, timeout_s: float, reattach_s: float
    ) -> None:
        self._routers = routers
        self._request = request
        self._deadline = time.monotonic() + timeout_s
        self._course = Course(request.tenant, len(routers.addresses), reattach_s)
        self._ended = False
        self._begun = asyncio.ensure_future(routers.generate(request, timeout_s))
        """The call that is listened to. Several routers may have to be tried."""
        self._silent: list[AsyncLine] = []
        """Calls before it that fell silent."""

    @property
    def request_id(self) -> str:
        """The router's name for the request; empty until the first piece."""
        return self._course.request_id

    @property
    def num_reattached(self) -> int:
        """How often the stream has gone on at another router, or at another start of one."""
        return self._course.num_reattached

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        try:
            while not self._ended:
                message = await self._next_message()
                piece = self._course.take(message)
                if message.request_id:
                    self._leave_earlier_calls()
                if piece is not None:
                    self._ended = piece.finish is not None
                    return piece
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    async def _next_message(self) -> router_pb2.GenerateResponse:
        while True:
            try:
                return await (await self._begun).next(self._course.patience)
            except DiptychError as error:
                await self._call_again(error)

    async def _call_again(self, error: DiptychError) -> None:
        """After the call has ended, or fallen silent, with `error`; raises what ends the stream."""
        if self._ended or self._routers.closed:
            raise error
        line = await self._begun
        self._course.learn_from(await line.metadata())
        now = time.monotonic()
        again = self._course.after_loss(error, now)
        self._routers.addresses.leave(line.address)
        await asyncio.sleep(again.pause_s)
        if self._ended:  # closed by another task meanwhile
            raise error
        left_s = max(0.0, self._deadline - now)
        self._silent.append(line)
        if again.attach:
            calling = self._routers.attach(self._course.attach_request(), left_s)
        else:
            calling = self._routers.generate(self._request, left_s)
        self._begun = asyncio.ensure_future(calling)

    def _leave_earlier_calls(self) -> None:
        for line in self._silent:
            line.cancel()
        self._silent.clear()

    def close(self) -> None:
        """Cancels the request everywhere unless it has ended. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._leave_earlier_calls()
        if not self._begun.done():
            self._begun.cancel()
        elif not self._begun.cancelled() and self._begun.exception() is None:
            self._begun.result().cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Speaks to one router at a time. Belongs to one event loop; connects at the first call, and again after
    a loss."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tenant: str = "",
        timeout_s: float = 600.0,
        reattach_s: float = 20.0,
        tls: TlsSettings | None = None,
    ) -> None:
        """As `Client`."""
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._reattach_s = reattach_s
        self._call_timeout_s = min(timeout_s, 10.0)
        self._routers = AsyncRouters(address, tls)

    @property
    def address(self) -> str:
        """The router that is spoken to now."""
        return self._routers.addresses.current

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
        request.heartbeat_s = HEARTBEAT_S
        return AsyncGeneration(self._routers, request, self._timeout_s, self._reattach_s)

    async def cancel(self, request_id: str) -> bool:
        """Ends a request of this tenant everywhere. False: no such live request."""
        request = router_pb2.CancelRequest(request_id=request_id, tenant=self._tenant)

        async def cancelled(router: RouterAsyncStub) -> bool:
            return (await router.Cancel(request, timeout=self._call_timeout_s)).found

        return await self._routers.ask_all(cancelled)

    async def status(self) -> RouterStatus:
        """The router, its workers and their load."""
        request, timeout_s = router_pb2.StatusRequest(), self._call_timeout_s
        return read_status(await self._routers.ask(lambda router: router.Status(request, timeout=timeout_s)))

    async def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        request, timeout_s = router_pb2.ListModelsRequest(), self._call_timeout_s
        answer = await self._routers.ask(lambda router: router.ListModels(request, timeout=timeout_s))
        return read_models(answer)

    async def close(self) -> None:
        """Ends every call that is under way. Idempotent."""
        await self._routers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
