"""The two outputs of every command, and how an error looks: one or two red lines, never a traceback."""

from __future__ import annotations

import sys
import tempfile
import traceback
from typing import Final

from rich.console import Console
from rich.text import Text

from diptych.domain import errors
from diptych.domain.errors import DiptychError

out: Final = Console(highlight=False)
err: Final = Console(stderr=True, highlight=False)

_CONTROLS: Final = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

_ADVICE: Final[tuple[tuple[type[DiptychError], str], ...]] = (
    (errors.InvalidField, ""),
    (errors.UnknownModel, "see what is served with `diptych models`"),
    (errors.TooLarge, "shorten the prompt, or ask for fewer tokens"),
    (errors.StoreUnavailable, "check that Redis runs there and is reachable"),
    (errors.PeerLost, "check with `diptych status`; start a system with `diptych up`"),
    (errors.DigestMismatch, "try again: what was fetched or read is not what was announced"),
    (errors.TransferFailed, "try again; check the network if it stays so"),
    (errors.Draining, "try again, elsewhere or in a moment"),
    (errors.DeadlineExceeded, "try again, or look at the logs of what took so long"),
    (errors.Internal, "this is a bug of ours: the logs tell more"),
)


def write(text: str) -> None:
    """A model's text, at once and as it is; only a terminal gets no control characters, which command it."""
    sys.stdout.write(text.translate(_CONTROLS) if out.is_terminal else text)
    sys.stdout.flush()


def show_error(error: DiptychError) -> None:
    """What happened and where, and below it what to do next."""
    err.print(Text(f"diptych: {error}", "red"), soft_wrap=True)
    if advice := advise(error):
        err.print(Text(f"  → {advice}", "red"), soft_wrap=True)


def show_bug(error: Exception) -> None:
    """An error that nobody expected, and where its traceback is."""
    with tempfile.NamedTemporaryFile("w", prefix="diptych-bug-", suffix=".txt", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    err.print(Text(f"diptych: unexpected {type(error).__name__}: {error}", "red"), soft_wrap=True)
    err.print(Text(f"  → this is a bug of ours; its traceback is in {file.name}", "red"), soft_wrap=True)


def advise(error: DiptychError) -> str:
    """What to do next; empty where the error itself says it."""
    if isinstance(error, errors.Overloaded):
        return f"try again in {error.retry_after_s:g} s"
    if "`diptych up`" in str(error):
        return ""
    return next((advice for kind, advice in _ADVICE if isinstance(error, kind)), "")
