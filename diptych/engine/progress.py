"""How far a fetch or a conversion has come: one call, and a face for a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Display


class Progress(Protocol):
    """Called with what is being done, and how much of it. `total` 0: nobody knows how much there is."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def silent(what: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


class Bars:
    """A Progress that draws one bar for each thing that is done; `with Bars(console) as progress: …`.

    Where the console is no terminal it prints one line a thing.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._display = Display(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        )

    def __enter__(self) -> Bars:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        task = self._tasks.get(what)
        if task is None:
            for earlier in self._tasks.values():  # one thing at a time: what came before is over
                self._display.update(earlier, total=1, completed=1)
            task = self._tasks[what] = self._display.add_task(what, total=total or None)
            if not self._console.is_terminal:
                self._console.print(f"{what} …", highlight=False)
        self._display.update(task, completed=done, total=total or None)
