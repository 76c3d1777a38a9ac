"""How far a fetch or a conversion has come: one call. `diptych.engine.fetch.Bars` shows it on a terminal."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is being done, and how much of it. `total` 0: nobody knows how much there is."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def silent(what: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""
