"""Tells how far a long test is: a line for each thing that happens, and a bar below them on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)


class Narrator:
    """`state` is asked for a few words beside the bar."""

    def __init__(self, title: str, total: int, state: Callable[[], str]) -> None:
        self._state = state
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=Console(soft_wrap=True, highlight=False), transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total, state="")
        self._num_done = 0
        self._total = total

    def tell(self, line: str) -> None:
        """Something happened; the bar moves on by one."""
        self._num_done += 1
        self._progress.update(self._task, advance=1, state=self._state())
        text = f"{self._num_done:4}/{self._total} {line}"
        if not self._progress.console.is_terminal:
            text += f" ({self._state()})"
        self.say(text)

    def say(self, text: str) -> None:
        """A line that is no step."""
        self._progress.console.print(text, markup=False)

    def __enter__(self) -> Self:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress.console.is_terminal:
            self._progress.stop()
