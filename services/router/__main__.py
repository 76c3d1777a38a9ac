"""`python -m services.router`: from settings to a router that serves, and back to nothing.

model read ─▶ store reached ─▶ listening ─▶ registered ─▶ serving ─▶ asked to leave
                                                                         │
    deregistered ◀─ sessions closed ◀─ workers confirmed cancels ◀─ streams ended, or cancelled at
    `drain_s`
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from functools import partial

from diptych.domain.ids import Cell, WorkerId
from diptych.domain.records import Role, WorkerLoad, WorkerRecord
from diptych.rpc.dial import Dialer
from diptych.rpc.process import run_service
from diptych.rpc.server import RpcServer, serve
from diptych.rpc.settings import read_settings
from diptych.store.connect import connect
from diptych.store.membership import Membership, new_epoch
from diptych.store.registry import Registry
from diptych.v1.router_pb2_grpc import add_RouterServicer_to_server
from services.router.assemble import assemble, tls_of
from services.router.config import RouterSettings
from services.router.decisions import WorkerRef
from services.router.loop import RouterLoop
from services.router.model import load_model

log = logging.getLogger(__name__)


async def serve_router(settings: RouterSettings, leave: asyncio.Event) -> None:
    """Serves until `leave` is set, then drains. Raises what kept it from starting."""
    model = await asyncio.to_thread(load_model, settings.model, settings.model_name)
    tls = tls_of(settings)
    async with AsyncExitStack() as stack:
        redis = await connect(settings.redis_url)
        stack.push_async_callback(redis.aclose)
        dialer = await stack.enter_async_context(Dialer(tls))
        me = WorkerRef(WorkerId(settings.worker_id), new_epoch())
        address = settings.listen

        def record() -> WorkerRecord:
            load = WorkerLoad(
                num_running=len(loop.live) - loop.policy.num_queued,
                num_waiting=loop.policy.num_queued,
                ttft_s=loop.recent.ttft_p50_s,
                tpot_s=loop.recent.tpot_p50_s,
            )
            return WorkerRecord(
                me.worker_id, Role.ROUTER, me.epoch, Cell(settings.cell), model.name, "", address, load=load
            )

        membership = Membership(Registry(redis, settings.shard), record, settings.heartbeat_s, settings.ttl_s)
        loop, servicer = assemble(settings, model, me, dialer, membership.peers, lambda: membership.available)
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
        print(f"router {me.worker_id} listening on {server.address}", flush=True)  # noqa: T201
        await _until_left(loop, server, settings, leave)


async def _until_left(
    loop: RouterLoop, server: RpcServer, settings: RouterSettings, leave: asyncio.Event
) -> None:
    running = asyncio.create_task(loop.run(), name="router loop")
    asked = asyncio.create_task(leave.wait())
    try:
        await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running  # it never ends by itself: its error ends the process
        log.info("asked to leave: %d live requests", len(loop.live))
        await server.drain(settings.drain_s)
        await loop.drain(settings.cancel_wait_s)
    finally:
        for task in (running, asked):
            task.cancel()
        await asyncio.wait({running, asked})


def main() -> int:
    """Reads settings and runs; gives the exit status."""
    settings = read_settings(RouterSettings, "router")
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    log.info("settings: %s", settings.printable())
    return run_service(partial(serve_router, settings))


if __name__ == "__main__":
    sys.exit(main())
