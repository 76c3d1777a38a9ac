"""How long an abort takes until both sides hold nothing: a client that goes away in a random state.

Each sample is a long prompt of its own, cancelled after a random part of the time in which it would have put
out a few tokens. Before some of them another long prompt takes the prefill worker, so that they queue.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc

from bench.holdings import Workers, state_of
from bench.serve import prompt
from bench.system import System
from diptych.domain.records import Role
from diptych.rpc.dial import Dialer
from diptych.v1 import common_pb2, router_pb2
from diptych.v1.router_pb2_grpc import RouterStub

if TYPE_CHECKING:  # the name is in the stubs only
    from diptych.v1.router_pb2_grpc import RouterAsyncStub

STATES: Final = ("queued", "prefilling", "reading", "decoding")
SETTLE_S: Final = 60.0
BEHIND: Final = 0.35
"""Share of the samples that find the prefill worker busy."""
PAST_FIRST_TOKEN: Final = 1.5
"""Cancelled at a random moment up to so many times the usual time to a first token."""

Call = grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Lengths to draw from, and the vocabulary's size."""

    least: int
    most: int
    vocab_size: int


@dataclass(slots=True)
class Aborts:
    """What was found. Seconds from the cancel to the first answers that hold nothing, by state."""

    by_state: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: list[float] = field(default_factory=list)

    @property
    def all(self) -> list[float]:
        return [seconds for state in STATES for seconds in self.by_state.get(state, ())]


class _Stream:
    """One request that somebody reads."""

    def __init__(self, router: RouterAsyncStub, tokens: list[int], max_tokens: int) -> None:
        params = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=tokens), params=params)
        self._call: Call = router.Generate(request)
        self.first_at = 0.0
        self._reading = asyncio.create_task(self._read())

    async def request_id(self) -> str:
        """Told at admission, before any token."""
        metadata = await self._call.initial_metadata()
        return str(dict(metadata)["diptych-request-id"])

    async def first_token(self) -> float:
        """When it came."""
        while not self.first_at:
            if self._reading.done():
                raise RuntimeError("the stream ended before its first token")
            await asyncio.sleep(0.001)
        return self.first_at

    async def cancel(self) -> None:
        self._call.cancel()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        try:
            async for message in self._call:
                if message.tokens and not self.first_at:
                    self.first_at = time.monotonic()
        except (asyncio.CancelledError, grpc.aio.AioRpcError):
            pass


async def measure_aborts(
    system: System, num_samples: int, prompts: Prompts, progress: Callable[[int], None], seed: int = 1
) -> Aborts:
    """Cancels `num_samples` requests, one after the other."""
    names = [*system.workers(Role.PREFILL), *system.workers(Role.DECODE)]
    async with Dialer() as dialer:
        router: RouterAsyncStub = RouterStub(dialer.channel(system.router))
        workers = Workers(dialer, {name: system.address(name) for name in names})
        run = _Run(router, workers, prompts, random.Random(seed))
        await run.learn()
        for number in range(num_samples):
            await run.sample()
            progress(number + 1)
        return run.found


class _Run:
    def __init__(
        self, router: RouterAsyncStub, workers: Workers, prompts: Prompts, dice: random.Random
    ) -> None:
        self.found = Aborts()
        self._router = router
        self._workers = workers
        self._prompts = prompts
        self._dice = dice
        self._num_prompts = 0
        self._usual_s = 0.0

    async def learn(self) -> None:
        """The usual time to a first token."""
        for _ in range(2):  # the first one warms up
            begun = time.monotonic()
            stream = self._stream()
            self._usual_s = await stream.first_token() - begun
            await self._end(stream)

    async def sample(self) -> None:
        ahead = self._stream() if self._dice.random() < BEHIND else None
        stream = self._stream()
        request_id = await stream.request_id()
        await asyncio.sleep(self._dice.uniform(0.0, PAST_FIRST_TOKEN * self._usual_s))
        held = await self._workers.held(request_id)
        state = state_of([one for things in held.values() for one in things], bool(stream.first_at))
        await self._end(stream, state)
        if ahead is not None:
            await self._end(ahead)

    async def _end(self, stream: _Stream, state: str = "") -> None:
        """Cancels it and waits until that has settled; it counts where a state is given."""
        request_id = await stream.request_id()
        since = time.monotonic()
        await stream.cancel()
        settling = await self._workers.settle(request_id, since, SETTLE_S)
        if state:
            self.found.by_state[state].append(settling.seconds)
            self.found.gaps += settling.gaps

    def _stream(self) -> _Stream:
        self._num_prompts += 1
        length = self._dice.randint(self._prompts.least, self._prompts.most)
        tokens = prompt(self._num_prompts, length, self._prompts.vocab_size)
        return _Stream(self._router, tokens, 1000)
