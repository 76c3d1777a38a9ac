"""The boundary around every handler: errors become status, and the calls in flight are known.

    gRPC ──▶ Boundary ──▶ servicer method
             │  we are draining     refused with `Draining`
             │  DiptychError        its status, with details (`rpc.status`)
             │  grpc.RpcError       a peer failed the handler: the peer's own cause goes on to the caller
             │  CancelledError      passed through: the caller went away, or the server was stopped
             │  any other           INTERNAL with a plain sentence; the traceback stays in our log

Health and reflection (`/grpc.*`) pass untouched: they answer while we drain, and a health watch never ends.

A streaming handler is driven here with `context.write` rather than handed to gRPC as a generator, so that a
cancelled call closes the handler's generator at once, its `finally` blocks included, and not when the garbage
collector comes by.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from grpc.aio import ServicerContext

from diptych.domain.errors import DiptychError, Draining, Internal
from diptych.rpc.status import from_rpc_error, to_status

log = logging.getLogger(__name__)

_Context = ServicerContext[Any, Any]


class Boundary(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """One per server, for all four kinds of method."""

    def __init__(self) -> None:
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._running: set[object] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def num_running(self) -> int:
        """Calls whose handler has begun and not ended."""
        return len(self._running)

    def refuse_new(self) -> None:
        """From now on every new call ends as `Draining`."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no handler runs, at most `timeout_s`. Whether that came about."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """gRPC's hook, once a call. Methods are few, so what wraps each is made once."""
        method = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is None:
            handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(handler_call_details)
            if handler is None or method.startswith("/grpc."):
                return handler  # type: ignore[return-value]  # None is gRPC's word for an unknown method
            guarded = self._guarded[method] = self._guard(handler, method)
        return guarded

    def _guard(
        self, handler: grpc.RpcMethodHandler[Any, Any], method: str
    ) -> grpc.RpcMethodHandler[Any, Any]:
        behaviour: Any = (
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        )

        async def answer(request: Any, context: _Context) -> Any:
            async with self._scope(method, context):
                return await behaviour(request, context)

        async def stream(request: Any, context: _Context) -> None:
            async with self._scope(method, context):
                begun = behaviour(request, context)
                if inspect.isawaitable(begun):  # writes to the context itself
                    await begun
                    return
                async with aclosing(begun) as responses:
                    async for response in responses:
                        await context.write(response)

        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make(stream, handler.request_deserializer, handler.response_serializer)
        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(answer, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _scope(self, method: str, context: _Context) -> AsyncIterator[None]:
        if self._draining:
            await _abort(context, Draining("this process is leaving"))
        call = object()
        self._running.add(call)
        self._idle.clear()
        try:
            yield
        except DiptychError as error:
            await _abort(context, error)
        except grpc.RpcError as error:
            await _abort(context, from_rpc_error(error))
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("%s failed", method)
            await _abort(context, Internal(f"{method} failed; the log of the service that answered says why"))
        finally:
            self._running.discard(call)
            if not self._running:
                self._idle.set()


async def _abort(context: _Context, error: DiptychError) -> None:
    """End the call with `error`. Raises gRPC's `AbortError`, so that no handler goes on."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
