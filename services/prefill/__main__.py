"""`python -m services.prefill`: settings in, a worker until SIGTERM."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import msgspec

from diptych.domain.ids import WorkerId
from diptych.domain.records import Role
from diptych.engine.catalog import resolve
from diptych.engine.process import EngineProcess
from diptych.rpc.process import run_service
from diptych.rpc.settings import read_settings
from diptych.store.membership import new_epoch
from diptych.telemetry.log import configure_logging
from diptych.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from diptych.worker.service import run_worker
from services.prefill.config import PrefillServiceSettings
from services.prefill.messages import PrefillOutbox
from services.prefill.server import WorkerServicer
from services.prefill.worker import PrefillWorker


async def main(settings: PrefillServiceSettings, leave: asyncio.Event) -> None:
    """Runs until `leave` is set. Raises what kept the worker from starting, PeerLost when its engine dies."""
    model = await asyncio.to_thread(resolve, settings.model)
    argument = msgspec.json.encode(settings.loop_settings(model)).decode()
    engine = EngineProcess("services.prefill.loop", argument, PrefillOutbox)
    worker = PrefillWorker(settings, WorkerId(settings.worker_id), new_epoch(), engine)
    registrations = (partial(add_WorkerServicer_to_server, WorkerServicer(worker)),)
    await run_worker(settings, Role.PREFILL, settings.model_name or model.name, worker, registrations, leave)


if __name__ == "__main__":
    service_settings = read_settings(PrefillServiceSettings, "prefill")
    configure_logging(service_settings.log_level, service_settings.log_format, service_settings.worker_id)
    sys.exit(run_service(partial(main, service_settings)))
