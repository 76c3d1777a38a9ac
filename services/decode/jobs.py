"""What a decode worker says to Redis: jobs on its cell's bus, and the projection of its requests.

Nobody waits for any of it: each is a task with the store's own deadlines. A job that can't be posted is
reported, so that its request is prefilled locally; a projection that can't be written is made up for by the
next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

from diptych.domain.errors import Overloaded, Stale, StoreUnavailable
from diptych.domain.ids import Epoch, RequestId, WorkerId
from diptych.domain.records import PrefillJob, RequestRecord
from diptych.store.bus import PrefillBus
from diptych.store.requests import RequestProjection
from services.decode.messages import JobPosted

log = logging.getLogger(__name__)


class JobBoard:
    """Belongs to one event loop."""

    def __init__(
        self, bus: PrefillBus, requests: RequestProjection, worker_id: WorkerId, epoch: Epoch,
        unposted: Callable[[RequestId], None],
    ) -> None:  # fmt: skip
        self._bus = bus
        self._requests = requests
        self._worker_id = worker_id
        self._epoch = epoch
        self._unposted = unposted
        self._entries: dict[RequestId, asyncio.Task[str | None]] = {}
        self._records: dict[RequestId, RequestRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, posted: JobPosted) -> None:
        """Puts a job on the bus."""
        task = asyncio.create_task(self._post(posted), name="post job")
        self._entries[posted.request_id] = task

    def withdraw(self, request_id: RequestId) -> None:
        """Takes a job back that nobody needs any more, if it is still there."""
        posting = self._entries.pop(request_id, None)
        if posting is not None:
            self._spawn(self._withdraw(posting))

    def begun(self, request_id: RequestId) -> None:
        """A prefill worker has the job; it takes it off the bus itself."""
        self._entries.pop(request_id, None)

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

    async def close(self, timeout_s: float = 2.0) -> None:
        """Lets writes under way end."""
        pending = {*self._tasks, *self._entries.values()}
        if pending:
            _, late = await asyncio.wait(pending, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _post(self, posted: JobPosted) -> str | None:
        job = PrefillJob(
            posted.request_id, self._worker_id, self._epoch, posted.num_tokens, posted.num_held,
            posted.priority, time.time() + posted.timeout_s,
        )  # fmt: skip
        try:
            return await self._bus.post(job)
        except (StoreUnavailable, Overloaded) as error:
            log.warning("job of %s not posted: %s", posted.request_id, error)
            self._unposted(posted.request_id)
            return None

    async def _withdraw(self, posting: asyncio.Task[str | None]) -> None:
        entry_id = await posting
        if entry_id is not None:
            await self._bus.withdraw(entry_id)

    async def _write(self, record: RequestRecord, ended: bool) -> None:
        await (self._requests.end(record) if ended else self._requests.put(record))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(self._guarded(work), name="store write")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except (StoreUnavailable, Stale) as error:
            log.info("not written: %s", error)
