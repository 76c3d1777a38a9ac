"""`python -m diptych.engine.fetch [MODEL]`: fetches and converts a model, with bars, and prints where it
lies."""

from __future__ import annotations

import argparse
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Display

from diptych.domain.errors import DiptychError
from diptych.engine import catalog


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
            for earlier in self._display.tasks:  # one thing at a time: what came before is over
                if not earlier.finished:
                    self._display.update(earlier.id, total=1, completed=1)
            task = self._tasks[what] = self._display.add_task(what, total=total or None)
            if not self._console.is_terminal:
                self._console.print(f"{what} …", highlight=False)
        self._display.update(task, completed=done, total=total or None)


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 with one line on stderr that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m diptych.engine.fetch", description=__doc__)
    names = f"{catalog.DEFAULT}, {catalog.TOY}, a directory, a .gguf file, or ORG/NAME on the hub"
    parser.add_argument("model", nargs="?", default=catalog.DEFAULT, help=names)
    model: str = parser.parse_args(arguments).model
    console = Console(stderr=True)
    try:
        with Bars(console) as progress:
            found = catalog.resolve(model, progress)
    except DiptychError as error:
        console.print(f"diptych: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    sys.stdout.write(f"{found.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
