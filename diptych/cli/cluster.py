"""A whole system on this machine, as child processes of this one.

    start   the store first, then every service; a child that ends before all are ready ends the start
    ready   every child has printed its line, and the router lists every engine worker
    tick    called every few hundredths of a second: reaps what ended, starts what is due
    stop    SIGTERM to the router, then to all others, a bounded wait, SIGKILL; the store last

Everything happens in the caller's thread, the main one: the kernel ties a child to the life of the *thread*
that started it. A router that is restarted gets the port that it had; others are found through the registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from diptych.cli.certificates import tls_from_environment
from diptych.cli.layout import ChildSpec, ClusterLayout, children, pinned
from diptych.cli.member import Change, Member
from diptych.cli.process import ChildProcess, StoreProcess
from diptych.cli.supervision import State
from diptych.client import Client
from diptych.domain.errors import Cancelled, DeadlineExceeded, DiptychError, OurError
from diptych.domain.records import Role
from diptych.store.embedded import EmbeddedServer

TICK_S: Final = 0.05
START_TIMEOUT_S: Final = 300.0
STOP_GRACE_S: Final = 10.0
SETTLE_S: Final = 1.0
"""Two heartbeats: every process reads the registry with each of its own, so by then all know of all."""


class StartFailed(OurError):
    """A child ended before the system was ready. The message ends with what it said."""


class Cluster:
    """Children and their supervision. Enter it, `start`, then `tick`; leaving it stops everything."""

    def __init__(self, layout: ClusterLayout, folder: Path, store: EmbeddedServer | None) -> None:
        """`folder` takes each child's log. `store` is None where `layout.redis_url` is somebody else's."""
        self._folder = folder
        specs = children(layout)
        self._engines = {spec.worker_id for spec in specs if spec.role not in (Role.ROUTER, Role.CACHE)}
        self._store = Member("store", "store", lambda: StoreProcess(store)) if store else None
        self._services = [self._member(spec) for spec in specs]
        self._router = next(member for member in self._services if member.role == Role.ROUTER.value)

    @property
    def members(self) -> list[Member]:
        """Every child, the store first."""
        return [self._store, *self._services] if self._store else self._services

    @property
    def router(self) -> str:
        """Where the router listens; empty before it has said so."""
        return self._router.address

    @property
    def folder(self) -> Path:
        """Where the logs are."""
        return self._folder

    @property
    def num_restarts(self) -> int:
        """Of all children together."""
        return sum(member.supervision.num_restarts for member in self.members)

    def start(
        self, report: Callable[[Change], None], leave: Callable[[], bool], timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Returns when every child is ready, the router lists every worker, and they know of each other.

        Raises StartFailed when a child ends first, DeadlineExceeded when that takes too long, Cancelled when
        `leave` turns true. Whoever entered us stops what runs.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self._missing():
            self._step_of_start(report, leave)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"after {timeout_s:.0f} s not ready: {missing}; logs: {self._folder}")
        settled = time.monotonic() + SETTLE_S
        while time.monotonic() < settled:
            self._step_of_start(report, leave)

    def tick(self, now: float) -> list[Change]:
        """Reaps what has ended, starts what is due. Never raises for a child's sake."""
        return [change for member in self.members for change in member.tick(now)]

    def stop(self, hurry: Callable[[], bool] = lambda: False, grace_s: float = STOP_GRACE_S) -> None:
        """Ends every child: in order within `grace_s`; then, or once `hurry` is true, at once. Idempotent."""
        deadline = time.monotonic() + grace_s
        others = [member for member in self._services if member is not self._router]
        for leaving in (
            [self._router],
            others,
        ):  # the router first: it lets streams end, and needs the others
            for member in leaving:
                member.terminate()
            while any(m.is_running for m in leaving) and not hurry() and time.monotonic() < deadline:
                time.sleep(TICK_S)
        for member in (*self._services, *([self._store] if self._store else [])):
            member.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _member(self, spec: ChildSpec) -> Member:
        log = self._folder / f"{spec.worker_id}.log"

        def launch() -> ChildProcess:
            keeps_port = member.role == Role.ROUTER.value and member.address
            return ChildProcess(pinned(spec, member.address) if keeps_port else spec, log)

        member = Member(spec.worker_id, spec.role.value, launch)
        return member

    def _step_of_start(self, report: Callable[[Change], None], leave: Callable[[], bool]) -> None:
        changes = self.tick(time.monotonic())
        self._give_up_on_the_dead()  # before the report that it will be started again
        for change in changes:
            report(change)
        if leave():
            raise Cancelled("asked to leave before everything was ready")
        time.sleep(TICK_S)

    def _missing(self) -> str:
        """What is not ready yet, in words; empty when everything is."""
        waited_for = [member.name for member in self.members if member.state is not State.READY]
        if waited_for:
            return ", ".join(waited_for)
        try:
            with Client(self.router, timeout_s=2.0, tls=tls_from_environment()) as client:
                listed = {worker.worker_id for worker in client.status().workers}
        except DiptychError as error:
            return f"the router at {self.router} ({error})"
        unlisted = sorted(self._engines - listed)
        return f"unknown to the router: {', '.join(unlisted)}" if unlisted else ""

    def _give_up_on_the_dead(self) -> None:
        for member in self.members:
            if member.state is State.DOWN:
                said = "".join(f"\n  {line}" for line in member.last_words) or " nothing said"
                raise StartFailed(f"{member.name} ended before it was ready (logs in {self._folder}):{said}")
