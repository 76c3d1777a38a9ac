"""A command on a terminal of its own: what it draws, and what a user types."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.support.running_up import DEADLINE_S

LOGIN = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that runs us in the background has it ignored
os.login_tty(0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal the command's own, so that Ctrl-C is a signal to it."""


class Terminal:
    """Entered: the command runs on a pseudo-terminal. Left: it is killed if it still runs."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = command
        self._env = env
        self.shown = ""

    def __enter__(self) -> Self:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOGIN, *self._command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**self._env, "TERM": "xterm"},
        )
        os.close(slave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._master)

    def type(self, keys: str) -> None:
        """What a user types, control characters included."""
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> None:
        """Waits until `text` has been shown since the last wait, and forgets everything up to it."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} was not shown: {self.shown!r}"
            self._read(0.2)
        self.shown = self.shown.partition(text)[2]

    def wait_for_end(self) -> int:
        """Reads what still comes; the exit status."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            self._read(0.2)
        return self.process.returncode

    def _read(self, timeout_s: float) -> None:
        if select.select([self._master], [], [], timeout_s)[0]:
            with contextlib.suppress(OSError):  # EIO: the other end is closed
                self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
