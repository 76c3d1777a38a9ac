"""Asking an engine how it is now: what it says by itself may be a quarter second old.

    take ─▶ question 7 goes with the next batch ─▶ the engine's turn ends ─▶ its load answers 7 ─▶ returned

An engine answers at the end of a turn, and so after the step that it is in. One that has stopped does not
answer; whoever asked gets what is known after `WAIT_S`, and sees from its age that it is old.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from itertools import count

from diptych.domain.errors import PeerLost

WAIT_S = 2.0


class Looks:
    """Questions under way. Belongs to one event loop; `ask` puts a question into the engine's next inbox."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def take(self) -> None:
        """Returns when the engine has said how it is after this call, or in `WAIT_S` seconds without that."""
        look = next(self._numbers)
        self._waiting[look] = asyncio.get_running_loop().create_future()
        try:
            with contextlib.suppress(TimeoutError, PeerLost):
                self._ask(look)
                async with asyncio.timeout(WAIT_S):
                    await self._waiting[look]
        finally:
            del self._waiting[look]

    def answered(self, look: int) -> None:
        """A load came, taken after question `look` and all before it."""
        for number, waiting in self._waiting.items():
            if number <= look and not waiting.done():
                waiting.set_result(None)
