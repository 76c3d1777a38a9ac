"""A store, a router, a prefill, a decode and a cache process, with relays between all of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import grpc
from redis.asyncio import Redis

from diptych.cli.census import Census, Place, take
from diptych.cli.verdict import Finding, findings
from diptych.domain.records import WorkerRecord
from diptych.store.connect import connect
from diptych.store.embedded import EmbeddedServer
from diptych.store.registry import Registry
from diptych.v1 import worker_pb2
from diptych.v1.router_pb2_grpc import RouterStub
from diptych.v1.worker_pb2_grpc import WorkerStub
from tests.support.relay import HERE, THERE, Relays
from tests.support.running_up import wait_until

T = TypeVar("T")
SHARD: Final = "main"
ROLES: Final = ("cache", "decode", "prefill", "router")
COMMON: Final = ("--heartbeat-s", "0.1", "--ttl-s", "1", "--advertise", HERE)
FLAGS: Final = {
    "cache": ("--max-lease-s", "0.5", "--budget-bytes", "16MiB"),
    "decode": ("--model", "toy", "--num-blocks", "1024", "--detach-grace-s", "0.1",
               "--stall-timeout-s", "1.5", "--read-timeout-s", "2", "--toy-step-delay-s", "0.002"),
    "prefill": ("--model", "toy", "--num-blocks", "300", "--toy-step-delay-s", "0.002", "--lease-s", "2"),
    "router": ("--model", "toy", "--session-heartbeat-s", "0.1", "--session-silent-s", "5"),
}  # fmt: skip


class ServiceProcess:
    """One service over its restarts; it keeps its ports."""

    def __init__(self, role: str, url: str, folder: Path) -> None:
        self.role = role
        self.port = 0
        self.kv_port = 0
        self._url = url
        self._log = folder / f"{role}.log"

    @property
    def address(self) -> str:
        """Where others dial it: the relay."""
        return f"{HERE}:{self.port}"

    def start(self) -> None:
        """Returns when it serves."""
        flags = ["--worker-id", f"{self.role}-0", "--listen", f"{THERE}:{self.port}", *COMMON]
        if self.kv_port:
            flags += ["--kv-port", str(self.kv_port)]
        begin = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"services.{self.role}", *flags, *FLAGS[self.role]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "DIPTYCH_REDIS_URL": self._url, "PYTHONUNBUFFERED": "1"},
            )

        def listens() -> bool:
            assert self._process.poll() is None, self.said
            found = re.search(r" listening on \S+:(\d+)$", self.said[begin:], re.MULTILINE)
            self.port = int(found.group(1)) if found else self.port
            return bool(found)

        wait_until(listens, f"{self.role} serves")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


class RelayedSystem:
    """Entered: everybody serves, knows everybody, and hears everybody through a relay."""

    def __init__(self, folder: Path) -> None:
        self.relays = Relays()
        self._store = EmbeddedServer(folder / "v")
        self._folder = folder
        self._channels: dict[str, grpc.Channel] = {}
        self.services: dict[str, ServiceProcess] = {}

    @property
    def router(self) -> RouterStub:
        """The router, past the relay: clients are no part of this."""
        return RouterStub(self._channel("router"))

    def worker(self, role: str) -> WorkerStub:
        """A worker's own account of itself, past the relay."""
        return WorkerStub(self._channel(role))

    def inspect(self, role: str) -> worker_pb2.WorkerStatus:
        fresh = worker_pb2.InspectRequest(fresh=role != "cache")
        return self.worker(role).Inspect(fresh, timeout=20, wait_for_ready=True)

    def restart(self, role: str) -> None:
        """kill -9, and another start on the same ports."""
        self.services[role].kill()
        self.services[role].start()
        self.relay_all()
        self.know_each_other()

    def records(self) -> list[WorkerRecord]:
        return self.in_store(lambda redis: Registry(redis, SHARD).alive())

    def in_store(self, work: Callable[[Redis], Awaitable[T]]) -> T:
        async def connected() -> T:
            async with await connect(self._store.url) as redis:
                return await work(redis)

        return asyncio.run(connected())

    def relay_all(self) -> None:
        """Opens a relay wherever somebody may be dialled by now."""
        for service in self.services.values():
            if service.port:
                self.relays.open(service.address)
        for record in self.records():
            for endpoint in record.channels:
                self.relays.open(endpoint.address)

    def know_each_other(self) -> None:
        """Waits until the router may place a request, and decode may hand it on."""

        def ready() -> bool:
            names = {record.worker_id for record in self.records()}
            return (
                names == {f"{role}-0" for role in ROLES} and self.inspect("decode").num_prefill_workers == 1
            )

        wait_until(ready, "everybody is registered")

    def snapshot(self) -> dict[str, object]:
        """All that a message could change. Whole chunks in the cache aside: what has a digest is right."""
        told: dict[str, object] = {}
        for role in ("cache", "decode", "prefill"):
            status = self.inspect(role)
            load = status.load
            told[role] = (
                load.num_running, load.num_waiting, load.blocks_owned, load.slots_used, load.num_tokens,
                status.num_held, status.leaked,
            )  # fmt: skip
        return told

    def settle(self) -> dict[str, object]:
        """Waits until nobody holds anything for a request; gives the snapshot."""
        found: dict[str, object] = {}

        def at_rest() -> bool:
            found.update(self.snapshot())
            return all(one[:4] == (0, 0, 0, 0) and one[5] == 0 for one in found.values())  # type: ignore[index]

        try:
            wait_until(at_rest, "nothing is held", 60.0)
        except AssertionError as error:
            held = [list(self.inspect(role).held) for role in ("cache", "decode", "prefill")]
            raise AssertionError(f"{error}: {found} {held}") from error
        return found

    def audit(self) -> tuple[Census, list[Finding]]:
        """What `diptych audit` finds."""
        census = asyncio.run(take(Place("", self._store.url, SHARD)))
        return census, findings(census)

    def __enter__(self) -> RelayedSystem:
        self._store.start()
        self.relays.__enter__()
        for role in ROLES:
            self.services[role] = ServiceProcess(role, self._store.url, self._folder)
            if role == "router":
                self.relay_all()  # before anybody dials
            self.services[role].start()
        self.relay_all()
        self.services["cache"].kv_port = next(
            int(endpoint.address.rpartition(":")[2])
            for record in self.records()
            if record.worker_id == "cache-0"
            for endpoint in record.channels
        )
        self.know_each_other()
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()
        for service in self.services.values():
            service.signal(signal.SIGCONT)
            service.kill()
        self.relays.__exit__()
        self._store.stop()

    def _channel(self, role: str) -> grpc.Channel:
        if role not in self._channels:
            self._channels[role] = grpc.insecure_channel(f"{THERE}:{self.services[role].port}")
        return self._channels[role]
