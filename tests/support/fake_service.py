"""A process that behaves like a service to whoever starts it: flags, the ready line, SIGTERM. It serves
nothing, unless as a router, a scripted one. The model says what it is to do:

    toy        serve until SIGTERM          deaf    serve, ignore SIGTERM
    broken     complain and end             mute    never say that it serves
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from diptych.v1 import worker_pb2
from tests.support.fake_router import FakeRouter, worker


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in (
        "shard",
        "worker-id",
        "listen",
        "model",
        "model-name",
        "profile",
        "threads",
        "role",
        "threshold-tokens",
    ):
        parser.add_argument(f"--{flag}", default="")
    told = parser.parse_args()
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.model == "deaf" or leave.set())
    if told.model == "broken" and told.role == "decode":
        sys.stderr.write("InvalidField: model: 'broken' is no directory\n")
        return 2
    if told.worker_id.startswith("router"):
        port = int(told.listen.rpartition(":")[2])
        with FakeRouter(port=port) as router:
            for name in ("prefill-0", "decode-0"):
                router.status.workers.append(worker(name, worker_pb2.ROLE_DECODE))
            say(f"router {told.worker_id} listening on {router.address}")
            leave.wait()
    else:
        if told.model != "mute":
            say(f"{told.role or 'some'} {told.worker_id} listening on 127.0.0.1:1")
        leave.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
