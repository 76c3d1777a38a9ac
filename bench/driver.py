"""A subject in a process of its own, spoken to line by line; see `bench.serve` for its side."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.stats import NotRun

ROOT = Path(__file__).resolve().parents[1]
_READY_S = 600.0
_CALL_S = 900.0


class Driver:
    """Starts `command` and waits until it is ready. Raises NotRun when that fails."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            cwd=ROOT,
        )  # fmt: skip
        self._pending = b""
        try:
            self.about: dict[str, Any] = self._answer(_READY_S)["ready"]
        except NotRun:
            self.close()
            raise

    def call(self, op: str, **arguments: object) -> Any:
        """What `op` returned. Raises NotRun when it raised, or the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise NotRun(f"{self.name} is gone: {self._last_words()}") from None
        return self._answer(_CALL_S)["ok"]

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                self._process.kill()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line(timeout_s))
        if "error" in answer:
            raise NotRun(f"{self.name}: {answer['error']}")
        return answer

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if not select.select([handle], [], [], timeout_s)[0]:
                self._process.kill()
                raise NotRun(f"{self.name} said nothing for {timeout_s:.0f} s")
            piece = os.read(handle, 1 << 16)
            if not piece:
                raise NotRun(f"{self.name} is gone: {self._last_words()}")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no word"
