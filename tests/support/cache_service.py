"""A cache service in the test's process, with a real store, real gRPC and a memory channel with faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from diptych.domain.ids import Cell, ChunkHash, Epoch, WorkerId
from diptych.domain.records import ChannelEndpoint, Role, WorkerRecord
from diptych.rpc.chunks import CacheClient, Lent, Missed, Offered
from diptych.rpc.dial import Dialer
from diptych.store.connect import connect
from diptych.store.directory import ChunkDirectory
from diptych.store.embedded import EmbeddedServer
from diptych.store.registry import Registry
from diptych.transfer.faults import Faults
from diptych.transfer.memory import MemoryFabric
from diptych.v1 import cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.cache.arena import ALIGN
from services.cache.config import CacheSettings
from services.cache.service import CacheService
from tests.support.cache_rig import FINGERPRINT, NUM_TOKENS, WAIT_S, Offering, Worker
from tests.support.valkey import keys_of

UNITS = 4
SHARD = "test"


class ServiceRig:
    """The service (room for `UNITS` chunks), a registered worker, and a caller."""

    def __init__(self, server: EmbeddedServer, redis: Redis, settings: CacheSettings) -> None:
        self.server = server
        self.redis = redis
        self.fabric, self.faults = MemoryFabric(), Faults()
        self.worker = Worker(self.fabric.open())
        self.registry = Registry(redis, SHARD)
        self.directory = ChunkDirectory(redis, SHARD)
        self.service = CacheService(
            settings, Registry(redis, SHARD), self.directory, self.fabric.open(faults=self.faults)
        )
        self.dialer = Dialer()
        self.client = CacheClient(self.dialer)
        self.has_left = False

    async def start(self) -> None:
        region = self.worker.region
        mine = WorkerRecord(
            WorkerId("decode"),
            Role.DECODE,
            Epoch(1),
            Cell("main"),
            "toy",
            FINGERPRINT,
            "127.0.0.1:1",
            (ChannelEndpoint(region.kind, region.address),),
        )
        await self.registry.register(mine, 600.0)
        await self.service.start()

    async def leave(self) -> None:
        self.has_left = True
        await self.service.leave()

    async def close(self) -> None:
        if not self.has_left:
            await self.leave()
        await asyncio.to_thread(self.worker.channel.close)
        await self.dialer.close()

    @property
    def stub(self) -> Any:
        return cache_pb2_grpc.CacheStub(self.dialer.channel(self.service.address))

    @property
    def inspector(self) -> Any:
        return worker_pb2_grpc.WorkerStub(self.dialer.channel(self.service.address))

    async def offer(self, offering: Offering, fingerprint: str = FINGERPRINT) -> Offered:
        return await self.client.offer(
            self.service.address,
            chunk_hash=offering.name,
            fingerprint=fingerprint,
            num_tokens=NUM_TOKENS,
            piece=offering.piece,
            digest=offering.digest,
            timeout_s=WAIT_S,
        )

    async def lend(self, offering: Offering, fingerprint: str = FINGERPRINT) -> Lent | Missed:
        return await self.client.lend(
            self.service.address,
            chunk_hash=offering.name,
            fingerprint=fingerprint,
            lease_s=60.0,
            timeout_s=WAIT_S,
        )

    async def give_back(self, lease_id: int) -> bool:
        return await self.client.give_back(self.service.address, lease_id, timeout_s=WAIT_S)

    async def located(self, *offerings: Offering) -> set[ChunkHash]:
        alive = {(peer.worker_id, peer.epoch) for peer in await self.registry.alive()}
        return set(await self.directory.locate([offering.name for offering in offerings], alive))

    async def status(self) -> worker_pb2.WorkerStatus:
        return await self.inspector.Inspect(worker_pb2.InspectRequest(), timeout=WAIT_S)


Make = Callable[..., Awaitable[ServiceRig]]


@asynccontextmanager
async def cache_services(folder: Path) -> AsyncIterator[Make]:
    """`await make(**settings)`: a started rig. When the context ends, no key may be left in the store."""
    with EmbeddedServer(folder / "v") as server:
        async with AsyncExitStack() as stack:
            redis = await connect(server.url)
            stack.push_async_callback(redis.aclose)

            async def start(**rest: object) -> ServiceRig:
                told = {"worker_id": "cache", "budget_bytes": UNITS * ALIGN, "drain_s": 5.0, **rest}
                rig = ServiceRig(server, redis, CacheSettings(redis_url=server.url, shard=SHARD, **told))
                stack.push_async_callback(rig.close)
                await rig.start()
                return rig

            yield start
            await stack.aclose()
            async with await connect(server.url) as last:
                await Registry(last, SHARD).deregister(WorkerId("decode"), Epoch(1))
                left = [key for key in await keys_of(last, SHARD) if not key.endswith(":workers")]
            assert left == []
