"""One cache process, put together: keeper, membership, directory and server, and the order in which they
come and go.

    start: memory, channel ─▶ serve, not yet ready ─▶ register ─▶ ready
    leave: take and lend no more ─▶ withdraw all locations ─▶ wait for loans and reads to end ─▶ stop serving
           ─▶ deregister ─▶ close the channel

Readers check that what they read from is registered, so the registration outlives the last loan. Every step
of leaving is bounded; a loan that is cut short costs its reader a recomputation, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from functools import partial

from diptych.domain.errors import StoreUnavailable
from diptych.domain.ids import Cell, WorkerId
from diptych.domain.ports import KvChannel, Region
from diptych.domain.records import ChannelEndpoint, Role, WorkerLoad, WorkerRecord
from diptych.rpc.server import RpcServer, serve
from diptych.rpc.tls import TlsSettings
from diptych.store.directory import ENTRY_TTL_S, ChunkDirectory
from diptych.store.membership import Membership, new_epoch
from diptych.store.publisher import Publisher
from diptych.store.registry import Registry
from diptych.v1.cache_pb2_grpc import add_CacheServicer_to_server
from diptych.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from services.cache.config import CacheSettings
from services.cache.loop import ChunkKeeper, host_memory
from services.cache.server import CacheServicer, WorkerServicer
from services.cache.tiers import HostTier

log = logging.getLogger(__name__)

REPUBLISH_S = ENTRY_TTL_S / 4
"""How often the directory hears again of everything, so that no entry ends by its age."""
RETRY_S = 1.0


class CacheService:
    """Belongs to one event loop. `leave` ends what `start` began; the store's client is the caller's."""

    def __init__(
        self, settings: CacheSettings, registry: Registry, directory: ChunkDirectory, channel: KvChannel
    ) -> None:
        """Takes over `channel`. Raises InvalidField when the memory can't be had."""
        self._settings = settings
        self.epoch = new_epoch()
        self._worker_id = WorkerId(settings.worker_id)
        self.membership = Membership(
            registry,
            self.record,
            settings.heartbeat_s,
            settings.ttl_s,
            lambda: self._forgotten.set(),
        )
        self._directory = directory
        self.publisher = Publisher(self._directory, self._worker_id, self.epoch)
        self.keeper = ChunkKeeper(
            HostTier(settings.arena_bytes, settings.max_reads, settings.max_leases, settings.max_lease_s),
            host_memory(settings.arena_bytes),
            channel,
            self.publisher,
            self._is_known,
        )
        self._cache = CacheServicer(self.keeper, settings)
        self._server: RpcServer | None = None
        self._forgotten = asyncio.Event()
        """The store has lost its memory."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """`host:port` that peers dial. Only after `start`."""
        assert self._server
        return f"{self._settings.advertise_host}:{self._server.bound_port}"

    def record(self) -> WorkerRecord:
        """Who we are and how loaded, now."""
        region, audit = self.keeper.region, self.keeper.counted()
        return WorkerRecord(
            worker_id=self._worker_id,
            role=Role.CACHE,
            epoch=self.epoch,
            cell=Cell(self._settings.cell),
            model="",
            fingerprint="",
            rpc_address=self.address,
            channels=(ChannelEndpoint(region.kind, region.address),),
            load=WorkerLoad(num_running=audit.filling),
        )

    async def start(self, tls: TlsSettings | None = None) -> None:
        """Serves and registers. Raises InvalidField for an address that can't be had, StoreUnavailable."""
        worker = WorkerServicer(self.keeper, self.record, self._settings.max_leases)
        self._server = await serve(
            [
                partial(add_CacheServicer_to_server, self._cache),
                partial(add_WorkerServicer_to_server, worker),
            ],
            address=self._settings.listen,
            tls=tls,
            serving=False,
        )
        await self.membership.start()
        self._tasks = [
            asyncio.create_task(self.publisher.run(), name="publisher"),
            asyncio.create_task(self._republish(), name="republish"),
        ]
        await self._server.set_serving(True)

    async def leave(self) -> None:
        """Leaves in order, within `drain_s` and a few moments. Also right after a `start` that failed."""
        deadline = time.monotonic() + self._settings.drain_s
        self._cache.leave()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            await self._withdraw_all()
        if not await self.keeper.settle(deadline, self._has_borrowers):
            log.warning("left with loans or reads under way: %s", self.keeper.audit())
        if self._server:
            await self._server.drain(max(0.0, deadline - time.monotonic()))
        await self.membership.stop()
        await self.keeper.close()

    def _has_borrowers(self) -> bool:
        return any(peer.role.prefills or peer.role.decodes for peer in self.membership.peers())

    def _is_known(self, region: Region) -> bool:
        wanted = (region.kind, region.address)
        endpoints = (channel for peer in self.membership.peers() for channel in peer.channels)
        return any((endpoint.kind, endpoint.address) == wanted for endpoint in endpoints)

    async def _republish(self) -> None:
        while True:
            # With the chunks goes the note that we have some: who starts next in our name removes them by it.
            pause_s = REPUBLISH_S * random.uniform(0.8, 1.0)
            try:
                await self._directory.succeed(self._worker_id, self.epoch)
            except StoreUnavailable as error:
                log.info("what an earlier start left in the directory stays a while: %s", error)
                pause_s = RETRY_S * random.uniform(0.5, 1.5)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._forgotten.wait()
            self._forgotten.clear()
            self.keeper.republish()

    async def _withdraw_all(self) -> None:
        with contextlib.suppress(StoreUnavailable):  # our epoch ends, and with it all that it said
            await self._directory.sweep_worker(self._worker_id, self.epoch)
