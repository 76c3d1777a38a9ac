"""A decode worker's scheduler and runner under a constant number of requests, and what their memory held.

Each request declares a maximum, as clients do (`max_tokens`), and ends earlier than that, as texts do. When
one ends, the next is submitted. Prompts are short, so that steps are decodes and what is seen is decode's.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from statistics import fmean, median

from bench.contiguous import ContiguousPools
from bench.serve import prompt
from diptych.domain.blocks import BlockPool
from diptych.domain.holding import KvPools
from diptych.domain.ids import RequestId
from diptych.domain.ports import Runner
from diptych.domain.sampling import SamplingParams
from diptych.domain.slots import SlotRing
from services.decode.admission import DecodeSettings
from services.decode.handoffs import Handoffs, HandoffSettings
from services.decode.messages import Cancel, Submit
from services.decode.scheduler import DecodeScheduler

PROMPTS = range(17, 65)
MAXIMA = (192, 320, 512)
"""Prompt and output together, as declared."""


def declared(num_prompt_tokens: int) -> int:
    """The most tokens that a request with this prompt may have: some of `MAXIMA`, fixed by its length."""
    return MAXIMA[num_prompt_tokens % len(MAXIMA)]


def pools_of(allocator: str, num_blocks: int, block_tokens: int) -> KvPools:
    """ "paged" or "contiguous" memory."""
    if allocator == "contiguous":
        # The scheduler asks for the prompt and one more.
        return ContiguousPools(num_blocks, block_tokens, lambda num_tokens: declared(num_tokens - 1))
    return KvPools([BlockPool(num_blocks, block_tokens)])


@dataclass(slots=True)
class Seen:
    """What was counted at every step of the measured time. Shares are of the whole pool."""

    running: list[int] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    """Memory that holds a token."""
    reserved: list[float] = field(default_factory=list)
    """Memory that belongs to a request and holds nothing."""
    stranded: list[float] = field(default_factory=list)
    """Free memory while somebody waits for memory."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens of one request."""
    num_tokens: int = 0


class ClosedLoop:
    """`batch` requests at all times."""

    def __init__(self, runner: Runner, pools: KvPools, batch: int, seed: int) -> None:
        self._runner = runner
        self._pools = pools
        self._batch = batch
        self._random = random.Random(seed)
        self._num_submitted = 0
        self._planned: dict[RequestId, int] = {}
        self._outputs: dict[RequestId, int] = {}
        self._last: dict[RequestId, float] = {}
        handoffs = Handoffs(runner.layout, SlotRing(1, runner.layout.chunk_bytes()), HandoffSettings())
        settings = DecodeSettings(
            runner.max_context, frozenset(), colocated=True, max_batch=batch, pool_share=1.0
        )
        self._scheduler = DecodeScheduler(runner.layout, pools, handoffs, settings)
        for _ in range(batch):
            self._submit(first=True)

    def run(self, num_warm: int, num_steps: int) -> dict[str, float]:
        """Throughput, TPOT and memory over `num_steps` steps, after `num_warm` that don't count."""
        for _ in range(num_warm):
            self._step(Seen())
        seen = Seen()
        begun = time.perf_counter()
        for _ in range(num_steps):
            self._step(seen)
        seconds = time.perf_counter() - begun
        return {
            "tokens_per_s": seen.num_tokens / seconds,
            "tpot_ms": median(seen.gaps) * 1e3 if seen.gaps else 0.0,
            "running": fmean(seen.running),
            "filled": fmean(seen.filled),
            "reserved": fmean(seen.reserved),
            "stranded": fmean(seen.stranded),
        }

    def _submit(self, first: bool = False) -> None:
        self._num_submitted += 1
        length = self._random.choice(PROMPTS)
        most = declared(length) - length
        planned = self._random.randint(most // 8, most // 2)
        if first:  # as if they had begun at different times
            planned = self._random.randint(1, planned)
        name = RequestId(f"r{self._num_submitted}")
        self._planned[name] = planned
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        tokens = prompt(self._num_submitted, length, self._runner.vocab_size)
        self._scheduler.submit(Submit(name, "", "", tokens, 0, params, 0), time.monotonic())

    def _step(self, seen: Seen) -> None:
        scheduler = self._scheduler
        plan = scheduler.plan(time.monotonic())
        self._look(seen)
        begun = time.perf_counter()
        outcome = self._runner.run(plan)
        now = time.perf_counter()
        scheduler.commit(plan, outcome, now - begun, time.monotonic())
        for out in scheduler.take_effects().tokens:
            if out.finish is not None and out.finish.failure is not None:
                raise RuntimeError(out.finish.failure.message)
            self._took(out.request_id, len(out.tokens), now, seen)

    def _took(self, name: RequestId, num_tokens: int, now: float, seen: Seen) -> None:
        if name not in self._planned or not num_tokens:
            return
        seen.num_tokens += num_tokens
        if name in self._last:
            seen.gaps.append(now - self._last[name])
        self._last[name] = now
        self._outputs[name] = self._outputs.get(name, 0) + num_tokens
        if self._outputs[name] >= self._planned[name]:
            for kept in (self._planned, self._outputs, self._last):
                del kept[name]
            self._scheduler.cancel(Cancel(name), time.monotonic())
            self._submit()

    def _look(self, seen: Seen) -> None:
        live = [request for request in self._scheduler.live.values() if request.holding is not None]
        block_tokens = self._pools.block_tokens
        total = self._pools.total_tokens
        owned = sum(len(request.holding.tables[0]) * block_tokens for request in live if request.holding)
        filled = sum(len(request.tokens) for request in live)
        waiting = len(self._scheduler.live) - len(live)
        seen.running.append(len(live))
        seen.filled.append(filled / total)
        seen.reserved.append((owned - filled) / total)
        seen.stranded.append((total - owned) / total if waiting else 0.0)
