"""Places at which a test may kill, stop, fail or hold a process, in the manner of etcd's `gofail`.

A process that was started with `DIPTYCH_FAILPOINTS=FILE` looks into that file at each point that it passes;
without it a point costs one comparison. The file holds one line, `POINT ACTION`: the first process that
passes the point takes the line away and acts, so that each line acts once. Who acted is in the name of what
is left, `FILE.taken-PID`.

    kill     SIGKILL to this process          stop     SIGSTOP to this process
    error    raises Internal at the point     hold     nothing of this process goes on until somebody removes
                                                       what is left: time to do something to another process
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

from diptych.domain.errors import Internal

_FILE: Final = os.environ.get("DIPTYCH_FAILPOINTS", "")
HOLD_S: Final = 30.0
"""Longest hold: who armed it may be gone."""


def failpoint(point: str) -> None:
    """Acts if `point` is armed. Raises Internal for "error"."""
    if _FILE:
        _act(point)


def _act(point: str) -> None:
    path = Path(_FILE)
    taken = path.with_suffix(f".taken-{os.getpid()}")
    try:
        armed, _, action = path.read_text().strip().partition(" ")
        if armed != point:
            return
        # Whoever moves the file has the line; the others find it gone.
        path.rename(taken)
    except OSError:
        return
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold":
            give_up = time.monotonic() + HOLD_S
            while taken.exists() and time.monotonic() < give_up:
                time.sleep(0.001)
        case _:
            raise Internal(f"failpoint {point}")
