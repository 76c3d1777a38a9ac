"""A whole system for a benchmark: what `diptych up` starts, supervised while the benchmark waits.

    with started(UpOptions("toy"), DIPTYCH_TOY_STEP_DELAY_S="0.01") as system:
        system.run(measure(system))

The kernel ties children to the thread that started them, so everything happens in the caller's thread:
children are looked after between the steps of whatever coroutine `run` is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar

from diptych.cli.assemble import UpOptions, assembled
from diptych.cli.cluster import TICK_S, Cluster
from diptych.cli.layout import LOOPBACK, MODULES, ChildSpec
from diptych.cli.member import Member
from diptych.cli.process import ChildProcess
from diptych.cli.supervision import HEALTHY_S, State
from diptych.domain.records import Role

T = TypeVar("T")

BACK_S: Final = 120.0
LOOK_S: Final = 0.01


class System:
    """A cluster that is ready, and its processes by name."""

    def __init__(self, cluster: Cluster, model: str) -> None:
        self._cluster = cluster
        self._model = model
        self._members = {member.name: member for member in cluster.members}
        self._ready_at: dict[str, float] = {}
        """Of those that were started again."""

    @property
    def router(self) -> str:
        return self._cluster.router

    @property
    def store(self) -> str:
        """The URL of the store."""
        return self._members["store"].address

    def workers(self, role: Role) -> list[str]:
        """Names of the processes of one role."""
        return [name for name, member in self._members.items() if member.role == role.value]

    def address(self, name: str) -> str:
        """Where it listens, or listened last."""
        return self._members[name].address

    def kill(self, name: str) -> float:
        """SIGKILL; returns when, by the monotonic clock."""
        os.kill(self._members[name].pid, signal.SIGKILL)
        return time.monotonic()

    async def back(self, name: str, num_restarts: int) -> None:
        """Waits until it has been started so often again, and is ready. Raises TimeoutError."""
        async with asyncio.timeout(BACK_S):
            while not self._is_back(self._members[name], num_restarts):  # noqa: ASYNC110  `tick` finds out
                await asyncio.sleep(LOOK_S)

    async def steady(self, name: str) -> None:
        """Waits until its supervision takes it for healthy: then a restart does not wait longer than the
        first."""
        ready_at = self._ready_at.get(name, -HEALTHY_S)
        await asyncio.sleep(max(0.0, ready_at + HEALTHY_S - time.monotonic()))

    def num_restarts(self, name: str) -> int:
        return self._members[name].supervision.num_restarts

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end, and looks after the children meanwhile."""
        return asyncio.run(self._supervised(work))

    async def _supervised(self, work: Coroutine[Any, Any, T]) -> T:
        ticking = asyncio.create_task(self._tick())
        try:
            return await work
        finally:
            ticking.cancel()
            await asyncio.wait({ticking})

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            for change in self._cluster.tick(now):
                if self._members[change.name].state is State.READY:
                    self._ready_at[change.name] = now
            await asyncio.sleep(TICK_S)

    @contextlib.contextmanager
    def second_router(self) -> Iterator[str]:
        """Another router on the same store, until the exit; gives its address."""
        flags = ("--worker-id", "router-1", "--listen", f"{LOOPBACK}:0", "--model", self._model)
        spec = ChildSpec(
            Role.ROUTER, "router-1", MODULES[Role.ROUTER], flags, {"DIPTYCH_REDIS_URL": self.store}
        )
        child = ChildProcess(spec, self._cluster.folder / "router-1.log")
        try:
            yield _address_of(child)
        finally:
            child.kill()

    @staticmethod
    def _is_back(member: Member, num_restarts: int) -> bool:
        return member.state is State.READY and member.supervision.num_restarts >= num_restarts


def _address_of(child: ChildProcess) -> str:
    deadline = time.monotonic() + BACK_S
    while (address := child.address()) is None:
        if child.exit_status() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the second router did not come up: {child.last_lines()}")
        time.sleep(LOOK_S)
    return address


@contextlib.contextmanager
def started(options: UpOptions, **environment: str) -> Iterator[System]:
    """A system that is ready; stopped at the exit. `environment` is for its children."""
    # One secret for every router, also those that are started beside the cluster.
    with _environment({"DIPTYCH_SECRET": secrets.token_urlsafe(32), **environment}):
        with assembled(options) as cluster:
            cluster.start(lambda change: None, lambda: False)
            yield System(cluster, options.model)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
