"""A worker from start to drained.

    port bound, NOT_SERVING ─▶ engine ready ─▶ store reached ─▶ registered, SERVING ─▶ …
    … asked to leave, replaced, or engine gone ─▶ deregistered ─▶ streams drained ─▶ engine stopped

Ready means: the model is loaded, the engine has answered lately, and the store has been reached once. Later
the store may go; the worker stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from diptych.domain.engine_report import EngineLoad, EngineReady
from diptych.domain.errors import PeerLost, named_error
from diptych.domain.ids import Cell, Epoch, WorkerId
from diptych.domain.records import Link, Role, WorkerLoad, WorkerRecord
from diptych.rpc.dial import Dialer
from diptych.rpc.server import Registration, RpcServer, serve
from diptych.rpc.settings import ServiceSettings
from diptych.store.connect import Connection, connect
from diptych.store.membership import Membership
from diptych.store.registry import Registry
from diptych.telemetry.recorder import recorder_from_environment

STALL_S = 5.0
"""An engine that has said nothing for so long is not ready, whatever its process does."""


HEALTH_S = 0.5
FLUSH_S = 1.0


class WorkerProcess(Protocol):
    """What is particular to one kind of worker."""

    worker_id: WorkerId
    epoch: Epoch
    ready: EngineReady
    load: EngineLoad
    heard_at: float
    """When the engine last said anything, by `time.monotonic()`."""

    @property
    def links(self) -> tuple[Link, ...]:
        """To the workers that it reads from; those that its registration tells."""

    async def start(self) -> None:
        """Starts the engine and waits until it is ready."""

    def join(self, redis: Connection, membership: Membership, dialer: Dialer) -> None:
        """The store has been reached; work may begin."""

    async def run(self) -> None:
        """Works until the engine ends; raises PeerLost then."""

    def drain(self) -> None:
        """Takes nothing new from now on."""

    async def drained(self) -> None:
        """Returns when nothing is under way any more."""

    async def stop(self) -> None:
        """Ends tasks and the engine."""


async def run_worker(
    settings: ServiceSettings,
    role: Role,
    model_name: str,
    worker: WorkerProcess,
    registrations: Sequence[Registration],
    leave: asyncio.Event,
) -> None:
    """Runs a worker with its gRPC servicers until `leave` is set, and drains it.

    Raises the error that kept it from starting, and PeerLost when its engine died.
    """
    tls = settings.tls
    server = await serve(registrations, address=settings.listen, tls=tls, serving=False)
    try:
        await worker.start()
        redis = await connect(settings.redis_url)
        address = f"{settings.advertise_host}:{server.bound_port}"
        record = _recorder(settings, role, model_name, worker, address)
        registry = Registry(redis, settings.shard)
        membership = Membership(registry, record, settings.heartbeat_s, settings.ttl_s)
        dialer = Dialer(tls)
        recorder = recorder_from_environment(role.value, settings.worker_id)
        recorder.watch(lambda: dict(worker.load.counters))
        worker.join(redis, membership, dialer)
        try:
            await membership.start()
            print(f"{role.value} {settings.worker_id} listening on {address}", flush=True)  # noqa: T201
            await _work(worker, server, membership, leave, settings.drain_s)
        finally:
            await membership.stop()
            await worker.stop()
            await dialer.close()
            await redis.aclose()
            await asyncio.to_thread(recorder.close)
    finally:
        await server.drain(0.0)
        await worker.stop()


async def _work(
    worker: WorkerProcess, server: RpcServer, membership: Membership, leave: asyncio.Event, drain_s: float
) -> None:
    running = asyncio.create_task(worker.run(), name="worker")
    health = asyncio.create_task(_watch_health(worker, server), name="health")
    ends = {
        running,
        asyncio.create_task(leave.wait(), name="leave"),
        asyncio.create_task(membership.replaced.wait(), name="replaced"),
    }
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        health.cancel()
        if not running.done():
            await membership.stop()
            worker.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await worker.drained()
            await server.drain(FLUSH_S)
        else:
            running.result()
    finally:
        for task in (*ends, health):
            task.cancel()
        await asyncio.wait({*ends, health})


async def _watch_health(worker: WorkerProcess, server: RpcServer) -> None:
    serving = None
    while True:
        lively = time.monotonic() - worker.heard_at < STALL_S
        if lively is not serving:
            serving = lively
            await server.set_serving(lively)
        await asyncio.sleep(HEALTH_S)


def _recorder(
    settings: ServiceSettings, role: Role, model_name: str, worker: WorkerProcess, address: str
) -> Callable[[], WorkerRecord]:
    ready = worker.ready
    channels = tuple(ready.endpoints)

    def record() -> WorkerRecord:
        load = worker.load
        return WorkerRecord(
            worker.worker_id, role, worker.epoch, Cell(settings.cell), model_name, ready.fingerprint,
            address, channels, ready.capacity_tokens, ready.max_context,
            WorkerLoad(
                load.num_running, load.num_waiting, load.blocks_free + load.blocks_cached, load.blocks_total,
                0, load.ttft_s, load.tpot_s, worker.links,
            ),
        )  # fmt: skip

    return record


def checked_ready(ready: EngineReady | None) -> EngineReady:
    """The engine's first word. Raises the error that kept it from starting."""
    if ready is None:
        raise PeerLost("the engine process did not say that it is ready")
    if ready.error is not None:
        raise named_error(ready.error.kind, ready.error.message)
    return ready
