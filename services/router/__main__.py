"""`python -m services.router`: from settings to a router that serves, and back to nothing.

model read ─▶ store reached ─▶ listening ─▶ registered ─▶ serving ─▶ asked to leave, or replaced
                                                                          │
  deregistered ◀─ sessions closed ◀─ cancels confirmed ◀─ streams ended, or cut off at `drain_s`
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from functools import partial

from diptych.domain.errors import Stale
from diptych.domain.ids import Cell, WorkerId
from diptych.domain.records import Role, WorkerLoad, WorkerRecord
from diptych.rpc.dial import Dialer
from diptych.rpc.process import run_service
from diptych.rpc.server import RpcServer, serve
from diptych.rpc.settings import read_settings
from diptych.store.connect import connect
from diptych.store.membership import Membership, new_epoch
from diptych.store.registry import Registry
from diptych.store.secret import SharedSecret
from diptych.telemetry.log import configure_logging
from diptych.telemetry.recorder import recorder_from_environment
from diptych.v1.router_pb2_grpc import add_RouterServicer_to_server
from services.router.assemble import assemble
from services.router.config import RouterSettings
from services.router.decisions import WorkerRef
from services.router.loop import RouterLoop
from services.router.model import load_model
from services.router.tokens import KeyAgreement, ResumeTokens

log = logging.getLogger(__name__)


async def serve_router(settings: RouterSettings, leave: asyncio.Event) -> None:
    """Serves until `leave` is set, then drains.

    Raises what kept it from starting, and Stale when a later start of this worker has taken its name.
    """
    model = await asyncio.to_thread(load_model, settings.model, settings.model_name)
    tls = settings.tls
    async with AsyncExitStack() as stack:
        redis = await connect(settings.redis_url)
        stack.push_async_callback(redis.aclose)
        dialer = await stack.enter_async_context(Dialer(tls))
        recorder = recorder_from_environment("router", settings.worker_id)
        stack.push_async_callback(asyncio.to_thread, recorder.close)
        me = WorkerRef(WorkerId(settings.worker_id), new_epoch())
        registry = Registry(redis, settings.shard)
        address = settings.listen

        def record() -> WorkerRecord:
            cell = Cell(settings.cell)
            return WorkerRecord(
                me.worker_id, Role.ROUTER, me.epoch, cell, model.name, "", address, load=_load(loop)
            )

        tokens = ResumeTokens(settings.secret.get_secret_value())
        agreement = KeyAgreement(tokens, SharedSecret(redis, settings.shard, "resume"))
        if not settings.secret.get_secret_value():
            await stack.enter_async_context(agreement)
        membership = Membership(
            registry, record, settings.heartbeat_s, settings.ttl_s, on_forgotten=agreement.again
        )
        loop, servicer = assemble(
            settings, model, me, dialer, membership.peers, lambda: membership.available, recorder, tokens
        )
        stack.push_async_callback(loop.close)
        server = await serve(
            [partial(add_RouterServicer_to_server, servicer)],
            address=settings.listen,
            tls=tls,
            serving=False,
        )
        stack.push_async_callback(server.drain, 0)
        address = f"{settings.advertise_host}:{server.bound_port}"
        await membership.start()
        stack.push_async_callback(membership.stop)
        await server.set_serving(True)
        print(f"router {me.worker_id} listening on {address}", flush=True)  # noqa: T201
        await _until_left(loop, server, membership, settings, leave)
    if membership.replaced.is_set():
        raise Stale(f"a later start of worker {settings.worker_id} has taken its name")


async def _until_left(
    loop: RouterLoop,
    server: RpcServer,
    membership: Membership,
    settings: RouterSettings,
    leave: asyncio.Event,
) -> None:
    running = asyncio.create_task(loop.run(), name="router loop")
    ends = {running, asyncio.create_task(leave.wait()), asyncio.create_task(membership.replaced.wait())}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running  # it never ends by itself: its error ends the process
        log.info("leaving, with %d live requests", len(loop.live))
        await server.drain(settings.drain_s)
        await loop.drain(settings.cancel_wait_s)
    finally:
        for task in ends:
            task.cancel()
        await asyncio.wait(ends)


def _load(loop: RouterLoop) -> WorkerLoad:
    num_waiting = loop.policy.num_queued
    return WorkerLoad(
        num_running=loop.policy.num_live - num_waiting,
        num_waiting=num_waiting,
        ttft_s=loop.recent.ttft_p50_s,
        tpot_s=loop.recent.tpot_p50_s,
    )


def main() -> int:
    """Reads settings and runs; gives the exit status."""
    settings = read_settings(RouterSettings, "router")
    configure_logging(settings.log_level, settings.log_format, settings.worker_id)
    log.info("settings: %s", settings.printable())
    return run_service(partial(serve_router, settings))


if __name__ == "__main__":
    sys.exit(main())
