"""A worker's account of itself, for the wire."""

from __future__ import annotations

from diptych.domain.engine_report import EngineLoad, EngineReady
from diptych.domain.ids import Epoch, WorkerId
from diptych.v1 import common_pb2, worker_pb2


def status_message(
    worker_id: WorkerId,
    role: worker_pb2.Role.ValueType,
    epoch: Epoch,
    ready: EngineReady,
    load: EngineLoad,
    pid: int,
) -> worker_pb2.WorkerStatus:
    """What `Inspect` answers for a worker with an engine."""
    status = worker_pb2.WorkerStatus(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        model=ready.model,
        fingerprint=ready.fingerprint,
        pid=pid,
        load=worker_pb2.Load(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            blocks_owned=load.blocks_owned,
            blocks_total=load.blocks_total,
            slots_used=load.slots_used,
            slots_total=load.slots_total,
            num_tokens=load.num_tokens,
            tpot_s=load.tpot_s,
            ttft_s=load.ttft_s,
        ),
    )
    status.counters.extend(
        common_pb2.Fallback(reason=reason, count=count) for reason, count in sorted(load.counters.items())
    )
    return status
