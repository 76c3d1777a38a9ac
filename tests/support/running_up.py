"""`diptych up` as a user starts it: a process of its own, everything that it starts, and what it says."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

DEADLINE_S = 120.0

DIPTYCH = (sys.executable, "-m", "diptych.cli.main")


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Looks often until `condition` holds; fails with `what` when it does not in time."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Ours, with a runtime dir and a mark that every process started with it inherits."""
    clean = {name: value for name, value in os.environ.items() if name not in ("DIPTYCH_ROUTER", "REDIS_URL")}
    mark = str(uuid.uuid4())
    return {**clean, "XDG_RUNTIME_DIR": str(folder), "DIPTYCH_TEST_MARK": mark, "COLUMNS": "160", **more}


def marked(mark: str) -> dict[int, str]:
    """Process id and command line of every living process that bears the mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"DIPTYCH_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def stores(text: str) -> dict[int, str]:
    """The living stores of which `text` tells: Valkey writes its title over its environment, mark and all."""
    found = {}
    for pid in re.findall(r"^store: ready on .* \(pid (\d+)\)$", text, re.MULTILINE):
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "valkey" in title:
                found[int(pid)] = title
    return found


def forget_logs(text: str) -> None:
    """Removes the logs of which `text` tells: they are kept where something went wrong."""
    for path in re.findall(r"logs in (\S+/diptych-logs-\w+)", text):
        shutil.rmtree(path, ignore_errors=True)


def run(folder: Path, *arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """One command to its end. It must leave no process behind, and never show a traceback."""
    env = environment(folder, **more)
    done = subprocess.run(
        [*DIPTYCH, *arguments],
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    mark = env["DIPTYCH_TEST_MARK"]
    wait_until(lambda: not {**marked(mark), **stores(done.stdout)}, f"nobody left of {arguments}", 20.0)
    forget_logs(done.stdout)
    return done


class RunningUp:
    """Entered: started and ready. Left: asked to end by Ctrl-C, ended with 0, and nobody left."""

    def __init__(self, folder: Path, *arguments: str, **more: str) -> None:
        self._arguments: Sequence[str] = ("up", "--model", "toy", *arguments)
        self.env = environment(folder, **more)
        self.lines: list[str] = []
        self.router = ""
        self._expected_status = 0

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [*DIPTYCH, *self._arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        wait_until(lambda: bool(self._announced()) or self.process.poll() is not None, "up is ready")
        assert self._announced(), self.text
        self.router = self._announced()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
            status = self.process.wait(DEADLINE_S)
            self._reader.join(DEADLINE_S)
            if error is None:
                assert status == self._expected_status, self.text
                assert "Traceback" not in self.text, self.text
            wait_until(lambda: not self.left(), "nobody left", 20.0)
        finally:
            self._end()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def left(self) -> dict[int, str]:
        """Every process of this `up` that lives, itself included."""
        return {**marked(self.env["DIPTYCH_TEST_MARK"]), **stores(self.text)}

    def pid_of(self, name: str) -> int:
        """The process that was ready last under this name."""
        pids = re.findall(rf"^{name}: ready on \S+ \(pid (\d+)\)$", self.text, re.MULTILINE)
        return int(pids[-1])

    def num_ready(self, name: str) -> int:
        """How often that child has become ready."""
        return len(re.findall(rf"^{name}: ready on ", self.text, re.MULTILINE))

    def kill(self) -> None:
        """SIGKILL, for which nobody can prepare."""
        self._expected_status = -signal.SIGKILL
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def _end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        forget_logs(self.text)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def _announced(self) -> str:
        found = re.search(r"^router listening on (\S+:\d+)", self.text, re.MULTILINE)
        return found.group(1) if found else ""
