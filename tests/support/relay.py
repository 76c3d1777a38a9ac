"""A relay between two processes that speak gRPC: it knows no message, keeps every frame, meddles on demand.

    peer ──frames──▶ 127.0.0.2:PORT  relay ──frames──▶ 127.0.0.1:PORT  service
         ◀──────────                      ◀──────────

A service that listens on 127.0.0.1 and advertises 127.0.0.2 is reached through it by everybody who looks it
up in the registry. Frames are bytes: whatever the code under test thinks of its messages is not asked here.
Unary calls are streams of one message each way, which is what they are on the wire.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, TypeVar

import grpc

T = TypeVar("T")
UP: Final = "up"
DOWN: Final = "down"
WAIT_S: Final = 60.0
HERE: Final = "127.0.0.2"
THERE: Final = "127.0.0.1"
OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


@dataclass(eq=False)
class Passage:
    """One call, as it went through. `frames` in the order in which they came, each with its direction."""

    number: int
    method: str
    address: str
    frames: list[tuple[str, bytes]] = field(default_factory=list)
    extra: dict[str, asyncio.Queue[bytes | None]] = field(default_factory=dict)
    """What is still to be sent each way; None ends it. Tests may add to a call that lasts."""
    ended: bool = False
    break_off: Callable[[], object] = lambda: None

    def of(self, direction: str) -> list[bytes]:
        return [body for way, body in list(self.frames) if way == direction]


Meddle = Callable[[Passage, str, bytes | None], list[bytes] | None]
"""What goes on in place of a frame that has just come; None: it, as it is. At the end of a side's frames the
frame is None, and something may still be said before it."""


class Relays:
    """All relays of a test, on an event loop of their own, while entered."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self.meddle: Meddle = lambda *_: None
        self._numbers = count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays")
        self._servers: dict[str, grpc.aio.Server] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the relays' loop, from another thread."""
        running: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return running.result(WAIT_S)

    def open(self, address: str) -> None:
        """From now on what is dialled at `address` reaches the same port of 127.0.0.1."""
        host, _, port = address.rpartition(":")
        assert host == HERE, address
        if address not in self._servers:
            self.do(self._open(address, f"{THERE}:{port}"))

    def ask(self, address: str, method: str, *frames: bytes, timeout_s: float = 5.0) -> grpc.StatusCode:
        """A call of our own, past the relay, that says these frames and waits.

        Gives how it ended; also OK where the service goes on talking.
        Not asyncio's client: there a status gets lost that comes while a frame is sent.
        """
        port = address.rpartition(":")[2]
        over = threading.Event()

        def said() -> Iterator[bytes]:
            yield from frames
            over.wait(timeout_s)  # an end of ours would be an answer in itself

        with grpc.insecure_channel(f"{THERE}:{port}", OPTIONS) as channel:
            call: Any = channel.stream_stream(method)(said(), timeout=timeout_s)
            try:
                for _ in zip(range(len(frames) + 2), call, strict=False):
                    pass
                return grpc.StatusCode.OK
            except grpc.RpcError as error:
                return error.code()  # type: ignore[no-any-return,attr-defined]
            finally:
                over.set()
                call.cancel()

    def add(self, passage: Passage, direction: str, body: bytes) -> None:
        """Sends one more frame on a call that lasts."""
        self._loop.call_soon_threadsafe(passage.extra[direction].put_nowait, body)

    def lasting(self, method: str) -> list[Passage]:
        """Calls of that method that have not ended, the oldest first."""
        return [passage for passage in list(self.passages) if passage.method == method and not passage.ended]

    def break_off(self, passage: Passage) -> None:
        """Ends a call for both sides, as a broken connection does."""
        self._loop.call_soon_threadsafe(passage.break_off)

    def __enter__(self) -> Relays:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    async def _open(self, address: str, target: str) -> None:
        server = self._servers[address] = grpc.aio.server(options=OPTIONS)
        self._channels[address] = grpc.aio.insecure_channel(target, options=OPTIONS)
        server.add_generic_rpc_handlers((_At(self, address),))
        assert server.add_insecure_port(address)
        await server.start()

    async def _close(self) -> None:
        for server in self._servers.values():
            await server.stop(None)
        for channel in self._channels.values():
            await channel.close(None)

    async def carry(self, address: str, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        """One call to its end."""
        extra: dict[str, asyncio.Queue[bytes | None]] = {UP: asyncio.Queue(), DOWN: asyncio.Queue()}
        passage = Passage(next(self._numbers), method, address, extra=extra)
        self.passages.append(passage)
        call: Any = self._channels[address].stream_stream(method)(
            self._sent(passage, UP), timeout=context.time_remaining()
        )
        passage.break_off = call.cancel
        pumps = [
            asyncio.create_task(self._pump(passage, UP, requests)),
            asyncio.create_task(self._pump(passage, DOWN, call)),
        ]
        try:
            async for body in self._sent(passage, DOWN):
                await context.write(body)
            code, details = await call.code(), await call.details()
            if code is not grpc.StatusCode.OK:
                await context.abort(code, details or "", tuple(await call.trailing_metadata() or ()))
        finally:
            passage.ended = True
            call.cancel()
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    async def _pump(self, passage: Passage, direction: str, frames: AsyncIterator[bytes]) -> None:
        """From one side to what is to be sent to the other, meddled with."""
        try:
            async for body in frames:
                passage.frames.append((direction, body))
                meddled = self.meddle(passage, direction, body)
                for sent in [body] if meddled is None else meddled:
                    passage.extra[direction].put_nowait(sent)
        except (grpc.RpcError, asyncio.CancelledError):
            pass
        finally:
            for held in self.meddle(passage, direction, None) or ():
                passage.extra[direction].put_nowait(held)
            passage.extra[direction].put_nowait(None)

    async def _sent(self, passage: Passage, direction: str) -> AsyncIterator[bytes]:
        while (body := await passage.extra[direction].get()) is not None:
            yield body


class _At(grpc.GenericRpcHandler):
    """What arrives at one address."""

    def __init__(self, relays: Relays, address: str) -> None:
        self._relays = relays
        self._address = address

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def carried(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._relays.carry(self._address, method, requests, context)

        return grpc.stream_stream_rpc_method_handler(carried)
