"""What the transaction costs: digests as a share of the hand-off, and operations of the store a request.

Fences and digests cannot be turned off. So a digest is timed by itself, over as many bytes as a chunk has;
each chunk is digested twice, where it is packed and where it has landed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any, Final

from bench.failover_abort import Prompts
from bench.serve import prompt
from bench.stats import NotRun
from bench.system import System
from diptych.client import AsyncClient
from diptych.client.values import Trail
from diptych.engine.memory import allocate, digest
from diptych.store.connect import connect

DIGESTS_A_CHUNK: Final = 2
_NUM_TIMED: Final = 20
_PROMPTS: Final = count(1 << 20)
SETTLE_S: Final = 1.0
"""After the last answer, until what is written behind it has been written."""
SENT: Final = frozenset({"fcall", "fcall_ro", "get", "set"})
"""What processes send. The store counts also what its functions run inside of one call."""
UNCOUNTED: Final = frozenset({"info", "xreadgroup", "client|setinfo", "client|setname"})
"""Our own questions; claims, of which an idle worker makes more than a busy one; and new connections."""


@dataclass(slots=True)
class HandoffCosts:
    """By hand-off. Seconds."""

    handoff: list[float] = field(default_factory=list)
    """From the start of each chunk's read until it lies in the pool, over all its chunks."""
    exposed: list[float] = field(default_factory=list)
    digest: list[float] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def shares(self) -> list[float]:
        return [digest / handoff for digest, handoff in zip(self.digest, self.handoff, strict=True)]


@dataclass(frozen=True, slots=True)
class StoreCosts:
    """Commands that the store ran for one request, beyond what it runs by itself in the same time."""

    by_command: dict[str, float]
    idle_per_s: float

    @property
    def sent(self) -> float:
        """Calls of a process to the store."""
        return sum(count for name, count in self.by_command.items() if name in SENT)

    @property
    def total(self) -> float:
        """With what functions run inside of them."""
        return sum(self.by_command.values())


def digest_s(num_bytes: int) -> float:
    """Seconds that the digest of so many bytes takes: the median of several, over memory that was touched."""
    span = allocate(num_bytes)
    span.view()[:] = bytes(num_bytes)
    times = []
    for _ in range(_NUM_TIMED):
        begun = time.perf_counter()
        digest(span)
        times.append(time.perf_counter() - begun)
    return median(times)


async def handoff_costs(system: System, num_requests: int, prompts: Prompts) -> HandoffCosts:
    """Long prompts, one after the other. Raises NotRun when one is not handed over."""
    found = HandoffCosts()
    async with AsyncClient(system.router) as client:
        for _ in range(num_requests):
            trail = await _serve(client, prompts, 2)
            if trail.path != "disaggregated" or not trail.num_chunks:
                raise NotRun(f"a prompt was prefilled where it is decoded: {trail.path_reason}")
            chunk_bytes = trail.kv_bytes // trail.num_chunks
            found.handoff.append(trail.handoff_s)
            found.exposed.append(trail.exposed_s)
            found.digest.append(DIGESTS_A_CHUNK * trail.num_chunks * digest_s(chunk_bytes))
            found.num_bytes += trail.kv_bytes
    return found


async def store_costs(system: System, num_requests: int, num_tokens: int, prompts: Prompts) -> StoreCosts:
    """Answers of `num_tokens` to handed-over prompts, one after the other, against as long a time without
    any."""
    redis = await connect(system.store)
    try:
        async with AsyncClient(system.router) as client:
            await _serve(client, prompts, 2)  # everybody has loaded its functions
            await asyncio.sleep(SETTLE_S)
            before, begun = await _calls(redis), time.monotonic()
            for _ in range(num_requests):
                await _serve(client, prompts, num_tokens)
            await asyncio.sleep(SETTLE_S)
            between, seconds = await _calls(redis), time.monotonic() - begun
            await asyncio.sleep(seconds)
            after = await _calls(redis)
    finally:
        await redis.aclose()
    busy, idle = _less(between, before), _less(after, between)
    names = sorted(busy, key=lambda name: -busy[name])
    by_command = {name: (busy[name] - idle[name]) / num_requests for name in names if busy[name] > idle[name]}
    return StoreCosts(by_command, sum(idle.values()) / seconds)


async def _serve(client: AsyncClient, prompts: Prompts, max_tokens: int) -> Trail:
    tokens = prompt(next(_PROMPTS), prompts.most, prompts.vocab_size)
    async with client.generate(token_ids=tokens, max_tokens=max_tokens, ignore_eos=True) as generation:
        pieces = [piece async for piece in generation]
    finish = pieces[-1].finish
    if finish is None:
        raise NotRun("a stream ended without its last message")
    return finish.trail


async def _calls(redis: Any) -> Counter[str]:
    """Commands that the store has run, those that its functions ran among them. Ours does not count."""
    told: Mapping[str, Mapping[str, int]] = await redis.info("commandstats")
    counts = {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in told.items()}
    return Counter({name: calls for name, calls in counts.items() if name not in UNCOUNTED})


def _less(later: Counter[str], earlier: Counter[str]) -> Counter[str]:
    return Counter({name: calls - earlier[name] for name, calls in later.items()})
