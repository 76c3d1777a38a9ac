"""What a decode worker says to Redis: jobs on its cell's bus, and the projection of its requests.

Nobody waits for any of it: each is a task with the store's own deadlines. A job that can't be posted is
reported, so that its request is prefilled locally; a projection that can't be written is made up for by the
next one, the last one by the same again. Those of live requests are renewed now and then, all in one call:
what a dead worker left is gone soon, and what the store has lost comes back.

    posted ──▶ Begin ──▶ begun                              the job is its worker's
       │         └─ refused ─▶ watched again
       └─ nobody has asked for a while ─▶ looked for on the bus:  waits for a free worker, which is fine
                                                                  claimed, but its worker is silent ─▶ lost
                                                                  gone with the store's memory      ─▶ lost

A worker asks at once for what it has claimed: one that has not after `CLAIM_S` has stopped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Final

from diptych.domain.errors import DiptychError, Stale, StoreUnavailable
from diptych.domain.fallbacks import Fallback
from diptych.domain.ids import Epoch, RequestId, WorkerId
from diptych.domain.records import PrefillJob, RequestRecord
from diptych.rpc.failpoint import failpoint
from diptych.store.bus import PrefillBus
from diptych.store.requests import RequestProjection, Standing
from services.decode.messages import JobPosted

log = logging.getLogger(__name__)

CLAIM_S: Final = 1.0
"""A claimed job of which nothing is heard for so long is lost."""
LOOK_S: Final = 0.25
"""Between two looks at the bus, while there is a job of which nothing is heard."""
REWRITE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Posted:
    """A job that nobody has begun yet."""

    posting: asyncio.Task[str | None]
    at: float


class JobBoard:
    """Belongs to one event loop."""

    def __init__(
        self, bus: PrefillBus, requests: RequestProjection, worker_id: WorkerId, epoch: Epoch,
        unposted: Callable[[RequestId], None], lost: Callable[[RequestId, Fallback], None],
    ) -> None:  # fmt: skip
        self._bus = bus
        self._requests = requests
        self._worker_id = worker_id
        self._epoch = epoch
        self._unposted = unposted
        self._lost = lost
        self._entries: dict[RequestId, _Posted] = {}
        self._look_at = 0.0
        self._renew_at = 0.0
        self._records: dict[RequestId, RequestRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def post(self, posted: JobPosted) -> None:
        """Puts a job on the bus."""
        task = asyncio.create_task(self._post(posted), name="post job")
        self._entries[posted.request_id] = _Posted(task, time.monotonic())

    def withdraw(self, request_id: RequestId) -> None:
        """Takes a job back that nobody needs any more, if it is still there."""
        posted = self._entries.pop(request_id, None)
        if posted is not None:
            self._spawn(self._withdraw(posted.posting))

    def begun(self, request_id: RequestId) -> None:
        """A prefill worker has the job; it takes it off the bus itself."""
        self._entries.pop(request_id, None)

    def look(self, asked_for: Collection[RequestId]) -> None:
        """To be called often: looks after jobs of which nothing is heard, now and then. `asked_for`: requests
        for which a `Begin` waits for the engine's answer."""
        now = time.monotonic()
        silent = {
            request_id: posted
            for request_id, posted in self._entries.items()
            if now - posted.at >= CLAIM_S and request_id not in asked_for and posted.posting.done()
        }
        if silent and now >= self._look_at:
            self._look_at = math.inf  # one look at a time
            self._spawn(self._look(silent))

    def admitted(self, record: RequestRecord) -> None:
        """The first projection of a request."""
        self._records[record.request_id] = record
        self._spawn(self._write(record, ended=False))

    def ended(self, request_id: RequestId, state: str, num_output_tokens: int, finish_reason: str) -> None:
        """The last projection of a request."""
        record = self._records.pop(request_id, None)
        self._entries.pop(request_id, None)
        if record is not None:
            last = replace(
                record, state=state, version=record.version + 1, num_output_tokens=num_output_tokens,
                finish_reason=finish_reason,
            )  # fmt: skip
            self._spawn(self._write(last, ended=True))

    def renew(self) -> None:
        """To be called often: keeps the projections of live requests alive, now and then."""
        now = time.monotonic()
        if self._records and now >= self._renew_at:
            self._renew_at = now + self._requests.renew_s
            self._spawn(self._renew())

    async def close(self, timeout_s: float = 2.0) -> None:
        """Lets writes under way end."""
        self._closing = True
        pending = {*self._tasks, *(posted.posting for posted in self._entries.values())}
        if pending:
            _, late = await asyncio.wait(pending, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _post(self, posted: JobPosted) -> str | None:
        job = PrefillJob(
            posted.request_id, self._worker_id, self._epoch, posted.num_tokens, posted.num_held,
            posted.priority, time.time() + posted.timeout_s, num_attempts=posted.num_attempts,
        )  # fmt: skip
        try:
            failpoint("decode.posted")
            return await self._bus.post(job)
        except DiptychError as error:
            log.warning("job of %s not posted: %s", posted.request_id, error)
            self._unposted(posted.request_id)
            return None

    async def _withdraw(self, posting: asyncio.Task[str | None]) -> None:
        entry_id = await posting
        if entry_id is not None:
            await self._bus.withdraw(entry_id)

    async def _look(self, silent: Mapping[RequestId, _Posted]) -> None:
        try:
            ids = {request_id: await posted.posting for request_id, posted in silent.items()}
            known = {request_id: entry_id for request_id, entry_id in ids.items() if entry_id is not None}
            ages_s = await self._bus.claims(list(known.values()))
            for request_id, age_s in zip(known, ages_s, strict=True):
                if age_s is None or age_s >= CLAIM_S:
                    reason = Fallback.JOB_GONE if age_s is None else Fallback.CLAIM_STALLED
                    self._give_up(request_id, silent[request_id], reason)
        except StoreUnavailable:
            for request_id, posted in silent.items():
                self._give_up(request_id, posted, Fallback.STORE_UNAVAILABLE)
        finally:
            self._look_at = time.monotonic() + LOOK_S

    def _give_up(self, request_id: RequestId, posted: _Posted, reason: Fallback) -> None:
        if self._entries.get(request_id) is posted:
            log.warning("job of %s is lost: %s", request_id, reason)
            self._lost(request_id, reason)

    async def _renew(self) -> None:
        standing = await self._requests.renew(self._worker_id, self._epoch, list(self._records))
        for request_id, found in standing.items():
            record = self._records.get(request_id)  # it may have ended meanwhile
            if record is not None and found is Standing.GONE:
                self._spawn(self._write(record, ended=False))
            elif record is not None and found is Standing.TAKEN:
                del self._records[request_id]

    async def _write(self, record: RequestRecord, ended: bool) -> None:
        if not ended:
            await self._requests.put(record)
        while ended:
            try:
                await self._requests.end(record)
                ended = False
            except StoreUnavailable:  # nothing that comes later makes up for this one
                if self._closing:
                    raise
                await asyncio.sleep(REWRITE_S * random.uniform(0.5, 1.5))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(self._guarded(work), name="store write")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except (StoreUnavailable, Stale) as error:
            log.info("not written: %s", error)
