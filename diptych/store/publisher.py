"""What a worker's cache gains and loses, told to the directory in batches.

Telling each chunk by itself would cost a call a chunk; so changes are collected and sent every 100 ms, at
most a piece each time, which also limits the rush after the store lost everything. While the store is away
changes wait here, within a bound. What the bound drops costs a miss (a chunk nobody heard of) or a refused
loan (a chunk that is gone), no more.
"""

from __future__ import annotations

import asyncio
import random
from itertools import islice

from diptych.domain.errors import StoreUnavailable
from diptych.domain.ids import ChunkHash, Epoch, WorkerId
from diptych.domain.records import Tier
from diptych.store.directory import PIECE, ChunkDirectory

INTERVAL_S = 0.1
LONGEST_PAUSE_S = 5.0
MAX_PENDING = 20_000


class Publisher:
    """Publishes for one epoch of one worker. `add` and `remove` return at once; run `run` as a task."""

    def __init__(
        self,
        directory: ChunkDirectory,
        worker_id: WorkerId,
        epoch: Epoch,
        *,
        interval_s: float = INTERVAL_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._directory = directory
        self._worker_id = worker_id
        self._epoch = epoch
        self._interval_s = interval_s
        self._max_pending = max_pending
        self._pending: dict[ChunkHash, Tier | None] = {}  # None: withdraw
        self._wake = asyncio.Event()
        self.num_dropped = 0
        """Changes that were never told, because the store was away for too long."""

    @property
    def num_pending(self) -> int:
        """Changes that wait to be told."""
        return len(self._pending)

    def add(self, chunk: ChunkHash, tier: Tier) -> None:
        """The worker holds this chunk, in this tier."""
        self._note(chunk, tier)

    def remove(self, chunk: ChunkHash) -> None:
        """The worker holds this chunk no more."""
        self._note(chunk, None)

    async def flush(self) -> int:
        """Tells the oldest changes, one piece at most; returns how many. Raises StoreUnavailable, and keeps
        them.
        """
        piece = dict(islice(self._pending.items(), PIECE))
        gained = {chunk: tier for chunk, tier in piece.items() if tier is not None}
        lost = [chunk for chunk, tier in piece.items() if tier is None]
        if gained:
            await self._directory.publish(self._worker_id, self._epoch, gained)
        if lost:
            await self._directory.withdraw(self._worker_id, self._epoch, lost)
        for chunk, tier in piece.items():
            if chunk in self._pending and self._pending[chunk] is tier:  # not changed again meanwhile
                del self._pending[chunk]
        return len(piece)

    async def run(self) -> None:
        """Tells changes as they come, until cancelled. Backs off, with jitter, while the store is away."""
        num_failures = 0
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._pause_s(num_failures))
            try:
                await self.flush()
                num_failures = 0
            except StoreUnavailable:
                num_failures += 1
            if not self._pending:
                self._wake.clear()

    def _note(self, chunk: ChunkHash, tier: Tier | None) -> None:
        self._pending.pop(chunk, None)  # the newest word on a chunk goes to the end
        if len(self._pending) >= self._max_pending:
            del self._pending[next(iter(self._pending))]
            self.num_dropped += 1
        self._pending[chunk] = tier
        self._wake.set()

    def _pause_s(self, num_failures: int) -> float:
        if num_failures == 0:
            return self._interval_s
        longest_s = min(self._interval_s * 2.0**num_failures, LONGEST_PAUSE_S)
        return longest_s * random.uniform(0.5, 1.0)
