"""The gRPC face of a prefill worker: inspection only. Work comes over the bus, chunks leave over the KV
channel."""

from __future__ import annotations

import os
import time
from typing import Any

import grpc

from diptych.rpc.inspection import held_messages, status_message
from diptych.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.prefill.worker import PrefillWorker

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Inspection."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Inspect(self, request: worker_pb2.InspectRequest, context: Context) -> worker_pb2.WorkerStatus:  # noqa: N802
        worker = self._worker
        if request.fresh:
            await worker.looks.take()
        status = status_message(
            worker.worker_id, worker_pb2.ROLE_PREFILL, worker.epoch, worker.ready, worker.load, os.getpid()
        )
        held = worker.held()
        status.held.extend(held_messages(held))
        status.num_held = worker.load.num_held + len(held) - len(worker.load.held)
        status.silent_s = time.monotonic() - worker.heard_at
        status.counters.extend(
            common_pb2.Fallback(reason=reason, count=count)
            for reason, count in sorted(worker.all_counters().items())
        )
        return status

    async def DropCache(  # noqa: N802
        self, request: worker_pb2.DropCacheRequest, context: Context
    ) -> worker_pb2.DropCacheResponse:
        num_dropped = self._worker.load.blocks_cached
        self._worker.inbox.drop_cache.append(True)
        return worker_pb2.DropCacheResponse(num_dropped=num_dropped)
