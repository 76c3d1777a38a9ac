"""How long a stream pauses when a process that serves it is killed, beyond the prefill that this costs.

    decode    killed while it decodes: another worker gets prompt and output, and computes what no cache has
    prefill   killed while it prefills: another prefills from the start
    router    killed while tokens flow: the client goes on at another router, or at the same one started again

A gap is the longest time between two messages of a stream of which the later came after the kill. What one
prefill costs is measured in the same round, on the same system: the time to a first token of another prompt
of the same length, with nothing killed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Final

from bench.failover_abort import Prompts
from bench.holdings import PAUSE_S, Workers
from bench.serve import prompt
from bench.stats import NotRun
from bench.system import System
from diptych.client import AsyncClient
from diptych.client.aio import AsyncGeneration
from diptych.domain.records import Role
from diptych.rpc.dial import Dialer

MAX_TOKENS: Final = 64
BEFORE: Final = (3, 12)
"""Tokens that a stream has when its worker or router is killed."""
AFTER: Final = 4
"""Tokens that it must put out afterwards."""
IN_FLIGHT_S: Final = 0.05
"""Longer than a message takes: what comes later was sent after the kill."""
CALM_S: Final = 1.5
"""After a restart, until everybody knows of everybody."""

_PROMPTS: Final = count(1 << 16)
"""No two streams of a process share a prefix, whoever asks: a cached one would cost no prefill."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One kill. Seconds."""

    pause_s: float
    prefill_s: float

    @property
    def beyond_s(self) -> float:
        """What it cost beyond one prefill."""
        return max(0.0, self.pause_s - self.prefill_s)


@dataclass(slots=True)
class Stream:
    """When each message with tokens came, by the monotonic clock."""

    begun_at: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.begun_at

    def pause(self, killed_at: float) -> float:
        """The longest pause that ended after the kill."""
        moments = [self.begun_at, *self.times]
        return max(after - before for before, after in pairwise(moments) if after > killed_at)


class Gaps:
    """Streams through `routers`, one at a time, each with a prompt of its own. Belongs to one event loop."""

    def __init__(self, system: System, dialer: Dialer, routers: str, prompts: Prompts, seed: int = 1) -> None:
        names = [*system.workers(Role.PREFILL), *system.workers(Role.DECODE)]
        self._system = system
        self._dialer = dialer
        self._names = names
        self._client = AsyncClient(routers)
        self._prompts = prompts
        self._dice = random.Random(seed)

    async def close(self) -> None:
        await self._client.close()

    async def decode(self) -> Gap:
        """Kills the decode worker of a stream."""
        prefill_s = await self._prefill()
        return await self._kill_midway(prefill_s, self._decode_worker)

    async def router(self) -> Gap:
        """Kills the router of a stream. Nothing is computed anew."""
        # A child that dies again soon is started later: that would be another figure.
        await self._system.steady(self._system.workers(Role.ROUTER)[0])

        async def name(request_id: str) -> str:
            return self._system.workers(Role.ROUTER)[0]

        return await self._kill_midway(0.0, name)

    async def prefill(self) -> Gap:
        """Kills the prefill worker of a stream at a random moment before its first token."""
        prefill_s = await self._prefill()
        generation, stream = self._ask()
        reading = asyncio.create_task(_read(generation, stream, 1))
        name = await self._prefill_worker(reading)
        await asyncio.sleep(self._dice.uniform(0.0, 0.8 * prefill_s))
        before = self._system.num_restarts(name)
        killed_at = self._system.kill(name)
        await reading
        generation.close()
        await self._calm(name, before)
        if stream.times[0] <= killed_at:
            return await self.prefill()  # it was too late
        return Gap(stream.times[0] - killed_at, prefill_s)

    async def _kill_midway(self, prefill_s: float, whom: Callable[[str], Awaitable[str]]) -> Gap:
        generation, stream = self._ask()
        num_before = self._dice.randint(*BEFORE)
        await _read(generation, stream, num_before)
        name = await whom(generation.request_id)
        before = self._system.num_restarts(name)
        killed_at = self._system.kill(name)
        await _read(generation, stream, num_before + AFTER, killed_at)
        generation.close()
        await self._calm(name, before)
        return Gap(stream.pause(killed_at), prefill_s)

    async def _prefill(self) -> float:
        """Time to a first token while nothing happens."""
        generation, stream = self._ask()
        await _read(generation, stream, 1)
        generation.close()
        return stream.ttft_s

    def _ask(self) -> tuple[AsyncGeneration, Stream]:
        tokens = prompt(next(_PROMPTS), self._prompts.most, self._prompts.vocab_size)
        generation = self._client.generate(token_ids=tokens, max_tokens=MAX_TOKENS, ignore_eos=True)
        return generation, Stream(time.monotonic())

    async def _decode_worker(self, request_id: str) -> str:
        """Who decodes the request."""
        held = await self._workers().held(request_id, fresh=False)
        return next(name for name in held if name in self._system.workers(Role.DECODE))

    async def _prefill_worker(self, reading: asyncio.Task[None]) -> str:
        """Whoever begins to prefill: nothing else is under way."""
        while not reading.done():
            for name, account in (await self._workers().accounts(fresh=False)).items():
                if any(held.kind == "stream" for held in account.held):
                    return name
            await asyncio.sleep(PAUSE_S)
        raise NotRun("a prompt was not handed to a prefill worker")

    def _workers(self) -> Workers:
        """At the addresses that they have now."""
        return Workers(self._dialer, {name: self._system.address(name) for name in self._names})

    async def _calm(self, name: str, num_restarts: int) -> None:
        await self._system.back(name, num_restarts + 1)
        await asyncio.sleep(CALM_S)


async def _read(generation: AsyncGeneration, stream: Stream, num_tokens: int, killed_at: float = 0.0) -> None:
    """Until the stream has so many tokens, and has paused for as long as it will after a kill: what was on
    its way comes first. Ends with the stream."""
    while stream.num_tokens < num_tokens or (killed_at and not _went_on(stream, killed_at)):
        piece = await anext(generation, None)
        if piece is None:
            return
        if piece.tokens:
            stream.times.append(time.monotonic())
            stream.num_tokens += len(piece.tokens)


def _went_on(stream: Stream, killed_at: float) -> bool:
    """Whether tokens have come that nobody can have sent before the kill."""
    return stream.times[-1] > killed_at + IN_FLIGHT_S
