"""One child process and its log. Start children from the main thread: they are tied to the thread's life."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Final, Protocol

from diptych.cli.layout import ChildSpec, command
from diptych.store.embedded import EmbeddedServer

READY: Final = re.compile(r"^\w+ \S+ listening on (\S+)$", re.MULTILINE)
"""The one line that a service prints when it serves: `ROLE ID listening on HOST:PORT`."""


class Running(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int: ...

    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""

    def address(self) -> str | None:
        """Where it listens, once it has said so."""

    def last_lines(self, count: int = 5) -> list[str]:
        """The end of what this process wrote."""

    def terminate(self) -> None:
        """Asks it to leave. Does nothing once it has ended."""

    def kill(self) -> None:
        """Ends it, and waits for that."""


class ChildProcess:
    """A service. Both of its outputs go to the end of `log`."""

    def __init__(self, spec: ChildSpec, log: Path) -> None:
        self._log = log
        with log.open("ab") as file:
            self._begin = file.tell()
            self._process = subprocess.Popen(
                command(spec, os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for us: we end them in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        return self._process.poll()

    def address(self) -> str | None:
        found = READY.search(self._said())
        return found.group(1) if found else None

    def last_lines(self, count: int = 5) -> list[str]:
        return without_frames(self._said())[-count:]

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what it has started itself
        self._process.wait()

    def _said(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode("utf-8", "replace")


class StoreProcess:
    """The embedded store, seen as one more child. Its guard already ties it to our life."""

    def __init__(self, server: EmbeddedServer) -> None:
        """Starts it, or starts it again. Raises what `EmbeddedServer.start` raises."""
        self._server = server
        server.start()
        self.pid = server.pid or 0

    def exit_status(self) -> int | None:
        return None if self._server.is_running else 1

    def address(self) -> str | None:
        return self._server.url

    def last_lines(self, count: int = 5) -> list[str]:
        try:
            text = self._server.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return text.splitlines()[-count:]

    def terminate(self) -> None:
        self._server.stop()

    def kill(self) -> None:
        self._server.stop()


def without_frames(text: str) -> list[str]:
    """The lines of a log that say something: of a traceback only its last line, which names the error."""
    lines, in_traceback = [], False
    for line in text.splitlines():
        begins = line.startswith("Traceback (most recent call last)")
        in_traceback = begins or (in_traceback and line.startswith(" "))
        if line.strip() and not in_traceback:
            lines.append(line)
    return lines


def describe_exit(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
