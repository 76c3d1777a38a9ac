"""`routers` for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from diptych.client.addresses import Addresses
from diptych.client.aio_line import AsyncLine
from diptych.client.routers import CONNECT_S
from diptych.domain.errors import DiptychError, Draining, PeerLost
from diptych.rpc.dial import Dialer
from diptych.rpc.status import domain_errors
from diptych.rpc.tls import TlsSettings
from diptych.v1 import router_pb2
from diptych.v1.router_pb2_grpc import RouterStub

if TYPE_CHECKING:
    from diptych.v1.router_pb2_grpc import RouterAsyncStub

T = TypeVar("T")


class AsyncRouters:
    """Belongs to one event loop."""

    def __init__(self, given: str | Sequence[str], tls: TlsSettings | None) -> None:
        self.addresses = Addresses(given)
        self.closed = False
        self._dialer = Dialer(tls)

    async def generate(self, request: router_pb2.GenerateRequest, timeout_s: float) -> AsyncLine:
        """Begins a stream, at the first router that can be reached."""
        for _ in range(len(self.addresses) - 1):
            address = self.addresses.current
            if await _is_reachable(self._dialer.channel(address)):
                break
            self.addresses.leave(address)
        address = self.addresses.current
        return AsyncLine(address, self._stub(address).Generate(request, timeout=timeout_s))

    async def attach(self, request: router_pb2.AttachRequest, timeout_s: float) -> AsyncLine:
        """Goes on with a stream at the router that is spoken to now."""
        address = self.addresses.current
        return AsyncLine(address, self._stub(address).Attach(request, timeout=timeout_s))

    async def ask(self, question: Callable[[RouterAsyncStub], Awaitable[T]]) -> T:
        """The first answer. Raises what the last of them raises, or the first whose word is final."""
        for address in self.addresses.in_turn()[:-1]:
            try:
                with domain_errors():
                    return await question(self._stub(address))
            except (PeerLost, Draining):
                self.addresses.leave(address)
        with domain_errors():
            return await question(self._stub(self.addresses.current))

    async def ask_all(self, question: Callable[[RouterAsyncStub], Awaitable[bool]]) -> bool:
        """Whether one says yes. Raises the last error where none does and not all answered."""
        failure: DiptychError | None = None
        for address in self.addresses.in_turn():
            try:
                with domain_errors():
                    if await question(self._stub(address)):
                        return True
            except (PeerLost, Draining) as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    async def close(self) -> None:
        """Ends every call. Idempotent."""
        self.closed = True
        await self._dialer.close()

    def _stub(self, address: str) -> RouterAsyncStub:
        return RouterStub(self._dialer.channel(address))


async def _is_reachable(channel: grpc.aio.Channel) -> bool:
    settled = {
        grpc.ChannelConnectivity.READY: True,
        grpc.ChannelConnectivity.TRANSIENT_FAILURE: False,
        grpc.ChannelConnectivity.SHUTDOWN: False,
    }
    try:
        async with asyncio.timeout(CONNECT_S):
            while (state := channel.get_state(try_to_connect=True)) not in settled:
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return False
    return settled[state]
