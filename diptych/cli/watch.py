"""What `diptych up` shows while it runs: a live table on a terminal, else a line for whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from diptych.cli import figures
from diptych.cli.certificates import tls_from_environment
from diptych.cli.member import Change, Member
from diptych.cli.supervision import State
from diptych.client import Client, RouterStatus, WorkerInfo
from diptych.domain.errors import DiptychError

POLL_S: Final = 0.5

_STYLES: Final = {State.READY: "green", State.STARTING: "yellow", State.DOWN: "red"}


class StatusPoll:
    """Asks the router for its status twice a second, in a thread, so that a slow answer delays no restart."""

    def __init__(self, router: str) -> None:
        self._client = Client(router, timeout_s=2.0, tls=tls_from_environment())
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self.latest: RouterStatus | None = None
        """None while the router does not answer."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._leave.is_set():
            try:
                self.latest = self._client.status()
            except DiptychError:
                self.latest = None
            self._leave.wait(POLL_S)


class View(Protocol):
    """Shows a cluster while entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def note(self, change: Change) -> None:
        """Something happened."""

    def refresh(self) -> None:
        """Called with every tick."""


class LineView:
    """One line for each change, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def note(self, change: Change) -> None:
        self._console.print(f"{change.name}: {change.what}", markup=False, soft_wrap=True)

    def refresh(self) -> None:
        """Nothing: only changes are told."""


class TableView:
    """A table that is drawn anew a few times a second, and the changes above it."""

    def __init__(
        self, console: Console, members: Sequence[Member], latest: Callable[[], RouterStatus | None]
    ) -> None:
        self._members = members
        self._latest = latest
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, change: Change) -> None:
        self._live.console.print(f"{change.name}: {change.what}", markup=False)

    def refresh(self) -> None:
        """Nothing: the table draws itself."""

    def _draw(self) -> Table:
        return members_table(self._members, self._latest())


def members_table(members: Sequence[Member], status: RouterStatus | None) -> Table:
    """One row for each child, with what the router knows of it."""
    known = {worker.worker_id: worker for worker in status.workers} if status else {}
    table = Table(title=_title(status), caption="Ctrl-C stops everything", box=box.SIMPLE_HEAD)
    table.title_justify = table.caption_justify = "left"
    for name in ("role", "id", "pid", "state", "run + wait", "blocks", "TTFT", "TPOT", "restarts"):
        table.add_column(name, justify="left" if name in ("role", "id", "state") else "right")
    for member in members:
        pid = str(member.pid) if member.pid else "–"
        state = f"[{_STYLES[member.state]}]{member.state.value}"
        load = _load(known.get(member.name))
        table.add_row(
            member.role, escape(member.name), pid, state, *load, str(member.supervision.num_restarts)
        )
    return table


def _title(status: RouterStatus | None) -> str:
    if status is None:
        return "the router does not answer"
    ttft, tpot = figures.milliseconds(status.ttft_p50_s), figures.milliseconds(status.tpot_p50_s)
    store = "" if status.store_available else ", [red]store away[/]"
    return f"{status.num_live} live, {status.num_finished} finished, TTFT p50 {ttft}, TPOT p50 {tpot}{store}"


def _load(worker: WorkerInfo | None) -> tuple[str, str, str, str]:
    if worker is None:
        return "–", "–", "–", "–"
    return (
        f"{worker.num_running} + {worker.num_waiting}",
        figures.share(worker.blocks_used, worker.blocks_total),
        figures.milliseconds(worker.ttft_s),
        figures.milliseconds(worker.tpot_s),
    )
