"""What every engine process does around its loop: settings in, one "ready" or one reason why not, then turns.

It ignores SIGINT and SIGTERM: both go to a whole process group or come from outside, and the I/O process,
which drains first, ends us by closing the pair.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from diptych.domain.engine_report import FailureInfo
from diptych.domain.errors import DiptychError
from diptych.engine.mailbox import Mailbox

log = logging.getLogger(__name__)

In = TypeVar("In")
S = TypeVar("S")

IDLE_S = 0.25
"""Longest an idle loop sleeps: it then says how it is, and whatever waits on time is looked at."""


class EngineLoop(Protocol):
    """One worker's scheduler, runner and channel, joined."""

    def turn(self) -> None:
        """One round: take messages, run a step if there is one, send what came of it."""

    def close(self) -> None:
        """Lets go of memory and peers."""


def host_engine(
    settings_type: type[S],
    inbox_type: type[In],
    open_loop: Callable[[S, Mailbox[In]], EngineLoop],
    failed: Callable[[FailureInfo], object],
) -> int:
    """Runs an engine process: `argv` is the inherited socket's number and the settings as JSON.

    `failed` wraps the reason why it could not start into an outbox. Returns the exit status.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    mailbox = Mailbox(connection, inbox_type)
    settings = msgspec.json.decode(sys.argv[2].encode(), type=settings_type)
    try:
        loop = open_loop(settings, mailbox)
    except (DiptychError, MemoryError, OSError) as error:
        mailbox.send(failed(FailureInfo(type(error).__name__, str(error) or "no memory")))
        return 2
    try:
        while True:
            loop.turn()
    except EOFError:
        return 0
    finally:
        loop.close()


def idle_timeout(has_steps: bool, due_in_s: float) -> float:
    """How long to wait for messages, in seconds, when the next deadline is `due_in_s` seconds away."""
    return 0.0 if has_steps else max(0.0, min(IDLE_S, due_in_s))
