"""One client's call: what is written to it, and the signs of life that it asked for in the pauses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import grpc

from diptych.domain.errors import DeadlineExceeded, InvalidField
from diptych.v1 import router_pb2

T = TypeVar("T")
Metadata = tuple[tuple[str, str | bytes], ...]
Context = grpc.aio.ServicerContext[Any, Any]

SHORTEST_HEARTBEAT_S: Final = 0.05
LONGEST_HEARTBEAT_S: Final = 60.0

ALIVE: Final = router_pb2.GenerateResponse()
"""All that can be said of a request that was not taken in yet."""


class ClientCall:
    """Belongs to the task that serves the call."""

    def __init__(self, context: Context, heartbeat_s: float, slow_client_s: float) -> None:
        """`heartbeat_s`: as the client asked, 0 for none. Raises InvalidField."""
        is_one = math.isfinite(heartbeat_s) and SHORTEST_HEARTBEAT_S <= heartbeat_s <= LONGEST_HEARTBEAT_S
        if heartbeat_s and not is_one:
            bounds = f"{SHORTEST_HEARTBEAT_S:g} to {LONGEST_HEARTBEAT_S:g} s"
            raise InvalidField("heartbeat_s", f"must be 0, or from {bounds}, is {heartbeat_s:g}")
        self.heartbeat_s = heartbeat_s
        self._context = context
        self._slow_client_s = slow_client_s
        self._has_begun = False

    async def begin(self, metadata: Metadata) -> None:
        """Sends the initial metadata, unless a sign of life went out before them."""
        if not self._has_begun:
            self._has_begun = True
            await self._context.send_initial_metadata(metadata)

    async def write(self, message: router_pb2.GenerateResponse) -> None:
        """Raises DeadlineExceeded where the client takes nothing for too long."""
        self._has_begun = True
        try:
            async with asyncio.timeout(self._slow_client_s):
                await self._context.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"the client took nothing for {self._slow_client_s:g} s") from None

    async def waiting(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, with signs of life meanwhile. It is cancelled with the call."""
        if not self.heartbeat_s:
            return await work
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=self.heartbeat_s))[0]:
                await self.write(ALIVE)
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
