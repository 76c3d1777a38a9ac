"""Runs inside a container of the stack (piped to its python): asks every worker what it holds.

Drops every cache first, waits up to the given seconds for all of them to be empty, and prints what they said
last, a JSON object a worker. Needs nothing but the installed package.
"""

from __future__ import annotations

import json
import sys
import time

import grpc

from diptych.client import Client
from diptych.client.values import WorkerInfo
from diptych.domain.records import Role
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub

ROUTER = "127.0.0.1:50051"


def held(worker: WorkerInfo) -> dict[str, object]:
    """What a worker holds, once what it caches is dropped."""
    try:
        with grpc.insecure_channel(worker.address) as channel:
            stub = WorkerStub(channel)
            stub.DropCache(worker_pb2.DropCacheRequest(), timeout=5)
            load = stub.Inspect(worker_pb2.InspectRequest(), timeout=5).load
    except grpc.RpcError as error:
        return {"worker": worker.worker_id, "unreachable": str(error)}
    return {
        "worker": worker.worker_id,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "owned": load.blocks_owned,
        "cached": load.blocks_cached,
        "lost": load.blocks_total - load.blocks_free - load.blocks_cached - load.blocks_owned,
        "slots": load.slots_used,
        "bytes": load.bytes_used,
    }


def is_empty(found: dict[str, object]) -> bool:
    return "unreachable" not in found and not any(v for k, v in found.items() if k != "worker")


def main() -> None:
    deadline = time.monotonic() + float(sys.argv[1])
    with Client(ROUTER) as client:
        while True:
            status = client.status()
            rows = [held(worker) for worker in status.workers if worker.role is not Role.ROUTER]
            rows.append({"worker": "router", "live": status.num_live})
            if all(map(is_empty, rows)) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
