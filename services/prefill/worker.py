"""The I/O process of a prefill worker: claims jobs, asks for them, carries chunks' announcements.

    claim (Redis) ─▶ Begin (decode) ─▶ job leaves the bus ─▶ borrow ─▶ engine ─▶ announcements ─▶ done

Late binding: a job is claimed only when the engine has room for it, so that no job waits behind another
while a worker is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from diptych.domain.audit import Held, bounded, with_owners
from diptych.domain.engine_report import EngineLoad, EngineReady
from diptych.domain.errors import DiptychError, StoreUnavailable
from diptych.domain.ids import BlockHash, Cell, Epoch, WorkerId
from diptych.domain.records import ClaimedJob, Link, PrefillJob
from diptych.engine.process import Batch, EngineProcess
from diptych.rpc.chunks import CacheClient
from diptych.rpc.dial import Dialer
from diptych.rpc.failpoint import failpoint
from diptych.rpc.params import params_from_proto
from diptych.store.bus import PrefillBus
from diptych.store.connect import Connection
from diptych.store.directory import ChunkDirectory
from diptych.store.membership import Membership
from diptych.v1 import decode_pb2
from diptych.v1.decode_pb2_grpc import DecodeStub
from diptych.worker.looks import Looks
from diptych.worker.service import checked_ready
from services.prefill.config import PrefillServiceSettings
from services.prefill.handoff import HandoffStream, Identity, ask_begin, key_of
from services.prefill.held import attempt_name
from services.prefill.lending import Borrowings, Lending
from services.prefill.messages import (
    AttemptKey,
    Begun,
    PrefillInbox,
    PrefillOutbox,
    Released,
    Stopped,
)
from services.prefill.sources import CACHE, DECODE

if TYPE_CHECKING:  # the name is in the stubs only
    from diptych.v1.decode_pb2_grpc import DecodeAsyncStub

log = logging.getLogger(__name__)

CLAIM_BLOCK_MS = 500
RETRY_S = 0.5
LIVELY_S = 60.0
"""An engine that says nothing for so long hangs. Its longest steps, and the compiling before the first, are
shorter."""


class PrefillWorker:
    """See the module. Belongs to one event loop."""

    links: tuple[Link, ...] = ()
    """It reads from nobody whose link it watches."""

    def __init__(
        self,
        settings: PrefillServiceSettings,
        worker_id: WorkerId,
        epoch: Epoch,
        engine: EngineProcess[PrefillOutbox],
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.ready = EngineReady()
        self.load = EngineLoad(0, 0, 0, 0, 0, 0, 0, 0)
        self.heard_at = 0.0
        self.looks = Looks(lambda look: self.inbox.looks.append(look))
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._engine = engine
        self._batch: Batch[PrefillInbox] = Batch(engine, PrefillInbox)
        self._streams: dict[AttemptKey, HandoffStream] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(settings.max_jobs)
        self._leaving = asyncio.Event()

    @property
    def inbox(self) -> PrefillInbox:
        """What goes to the engine next."""
        return self._batch.open()

    async def start(self) -> None:
        """Starts the engine and waits until it is ready. Raises the error that kept it from starting."""
        await self._engine.start()
        first = await self._engine.receive()
        self.ready = checked_ready(first.ready)
        self.load = first.load or self.load
        self.heard_at = time.monotonic()

    def join(self, redis: Connection, membership: Membership, dialer: Dialer) -> None:
        """The store has been reached."""
        shard = self._settings.shard
        self._membership = membership
        self._dialer = dialer
        self._bus = PrefillBus(redis, shard, Cell(self._settings.cell))
        self._us = Identity(self.worker_id, self.epoch, self.ready.fingerprint)
        self._lending = Lending(
            membership, ChunkDirectory(redis, shard), CacheClient(dialer), self.ready.fingerprint
        )

    async def run(self) -> None:
        """Works until the engine ends. Raises PeerLost then."""
        helpers = {
            asyncio.create_task(self._claim_jobs(), name="claim"),
            asyncio.create_task(self._sweep(), name="sweep"),
        }
        try:
            while True:
                outbox = await self._engine.receive()
                self.heard_at = time.monotonic()
                self._spread(outbox)
        finally:
            for task in (*helpers, *self._jobs):
                task.cancel()
            await asyncio.wait({*helpers, *self._jobs})
            await self._lending.close()

    def drain(self) -> None:
        """Claims no more."""
        self._leaving.set()

    async def drained(self) -> None:
        """Waits until every attempt has ended."""
        while self._jobs:
            await asyncio.wait(self._jobs)

    async def stop(self) -> None:
        """Ends the engine."""
        await self._engine.stop()

    def held(self) -> list[Held]:
        """What both processes hold. Only this one knows for which decode worker."""
        now = time.monotonic()
        owners = {attempt_name(key): stream.decode_worker for key, stream in self._streams.items()}
        streams = (
            Held("stream", attempt_name(key), stream.decode_worker, now - stream.opened_at)
            for key, stream in self._streams.items()
        )
        return [*with_owners(self.load.held, owners), *bounded(streams, self._lending.held(now))]

    def all_counters(self) -> Counter[str]:
        """What was counted on this side of the worker."""
        return self.counters + self._lending.counters + self._bus.dropped

    async def _claim_jobs(self) -> None:
        while not self._leaving.is_set():
            if not self._is_lively():  # others are
                await asyncio.sleep(RETRY_S)
                continue
            await self._room.acquire()
            claimed = None
            try:
                claimed = await self._bus.claim(self.worker_id, CLAIM_BLOCK_MS)
            except StoreUnavailable as error:
                log.info("no claim: %s", error)
                await asyncio.sleep(RETRY_S)
            finally:
                if claimed is None:
                    self._room.release()
            if claimed is not None:
                task = asyncio.create_task(self._serve(claimed), name=f"job {claimed.job.request_id}")
                self._jobs.add(task)
                task.add_done_callback(self._job_over)

    def _job_over(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            log.error("a job failed", exc_info=task.exception())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_s)
            try:
                await self._bus.sweep(round(self._settings.sweep_s * 1000))
            except StoreUnavailable as error:
                log.info("not swept: %s", error)

    async def _serve(self, claimed: ClaimedJob) -> None:
        """One job, from claim to the end of its attempt."""
        failpoint("prefill.claimed")
        job = claimed.job
        decode = self._membership.peer(job.decode_worker, job.decode_epoch)
        if decode is None:
            await self._membership.refresh()  # it may have come after our last look
            decode = self._membership.peer(job.decode_worker, job.decode_epoch)
        if decode is None:
            self.counters["decode_unknown"] += 1
            await self._off_the_bus(claimed)
            return
        stub: DecodeAsyncStub = DecodeStub(self._dialer.channel(decode.rpc_address))
        try:
            begun = await ask_begin(stub, job, self._us)
        except DiptychError as error:
            self.counters[f"begin_{type(error).__name__}"] += 1
            await self._off_the_bus(claimed)
            return
        failpoint("prefill.begun")
        await self._off_the_bus(claimed)
        await self._hand_off(stub, job, begun)

    async def _off_the_bus(self, claimed: ClaimedJob) -> None:
        with contextlib.suppress(StoreUnavailable):  # the bus sends it again with the next claim
            await self._bus.done(claimed.entry_id)

    async def _hand_off(
        self, stub: DecodeAsyncStub, job: PrefillJob, begun: decode_pb2.BeginResponse
    ) -> None:
        key = key_of(job, begun)
        stream = HandoffStream(
            key, job, self._us, self._is_lively,
            lambda index: self._release(Released(key, index, DECODE)),
        )  # fmt: skip
        carrying = asyncio.create_task(stream.run(stub), name=f"hand-off {key.request_id}")
        self._streams[key] = stream
        try:
            borrowed = Borrowings()
            if self._settings.borrow_chunks:
                borrowed = await self._lending.borrow(key, BlockHash(begun.cache_root), begun.tokens)
            if not carrying.done():
                self._begin(key, job, begun, borrowed)
                failpoint("prefill.engine_begun")
            if await carrying:
                failpoint("prefill.done")
                self.counters["handed_off"] += 1
            else:
                self.counters["attempt_ended_early"] += 1
        finally:
            carrying.cancel()
            await asyncio.wait({carrying})
            self.inbox.stops.append(Stopped(key))
            self._streams.pop(key, None)
            self._lending.give_back(key)

    def _begin(
        self,
        key: AttemptKey,
        job: PrefillJob,
        begun: decode_pb2.BeginResponse,
        borrowed: Borrowings,
    ) -> None:
        self.inbox.begins.append(
            Begun(
                key, list(begun.tokens), params_from_proto(begun.params, self.ready.vocab_size),
                list(begun.banned), begun.num_held, BlockHash(begun.cache_root), job.priority,
                borrowed.chunks, borrowed.fallback or "",
            )
        )  # fmt: skip

    def _spread(self, outbox: PrefillOutbox) -> None:
        if outbox.load is not None:
            self.load = outbox.load
            self.looks.answered(self.load.look)
        for chunk in outbox.chunks:
            failpoint("prefill.chunk")
            stream = self._streams.get(chunk.key)
            if stream is not None:
                stream.announce(chunk)
            if chunk.chunk_hash:
                release = Released(chunk.key, chunk.index, CACHE)
                self._lending.offer(chunk, partial(self._release, release))
        for manifest in outbox.manifests:
            failpoint("prefill.manifest")
            if manifest.key in self._streams:
                self._streams[manifest.key].conclude(manifest)
        for over in outbox.over:
            failpoint("prefill.over")
            if over.key in self._streams:
                self._streams[over.key].over(over.failure)
        for returned in outbox.borrowing_over:
            self._lending.give_back(returned.key)

    def _release(self, release: Released) -> None:
        failpoint("prefill.released")
        self.inbox.released.append(release)

    def _is_lively(self) -> bool:
        return not self._engine.is_stopped and time.monotonic() - self.heard_at < LIVELY_S
