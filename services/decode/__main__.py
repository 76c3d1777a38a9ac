"""`python -m services.decode`: settings in, a worker until SIGTERM."""

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
from diptych.text.tokenizer import load_tokenizer
from diptych.v1 import worker_pb2
from diptych.v1.decode_pb2_grpc import add_DecodeServicer_to_server
from diptych.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from diptych.worker.service import run_worker
from services.decode.config import DecodeServiceSettings
from services.decode.messages import DecodeOutbox
from services.decode.server import DecodeServicer, WorkerServicer
from services.decode.worker import DecodeWorker


async def main(settings: DecodeServiceSettings, leave: asyncio.Event) -> None:
    """Runs until `leave` is set. Raises what kept the worker from starting, PeerLost when its engine dies."""
    model = await asyncio.to_thread(resolve, settings.model)
    tokenizer = await asyncio.to_thread(load_tokenizer, model.path)
    argument = msgspec.json.encode(settings.loop_settings(model, tokenizer)).decode()
    engine = EngineProcess("services.decode.loop", argument, DecodeOutbox)
    worker = DecodeWorker(settings, WorkerId(settings.worker_id), new_epoch(), engine, tokenizer)
    role = Role(settings.role)
    shown = worker_pb2.ROLE_BOTH if role is Role.BOTH else worker_pb2.ROLE_DECODE
    registrations = (
        partial(add_DecodeServicer_to_server, DecodeServicer(worker)),
        partial(add_WorkerServicer_to_server, WorkerServicer(worker, shown)),
    )
    await run_worker(settings, role, settings.model_name or model.name, worker, registrations, leave)


if __name__ == "__main__":
    service_settings = read_settings(DecodeServiceSettings, "decode")
    configure_logging(service_settings.log_level, service_settings.log_format, service_settings.worker_id)
    sys.exit(run_service(partial(main, service_settings)))
