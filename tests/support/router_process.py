"""`python -m services.router`, and fake decode workers, as processes that a test may stop and kill."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Self

WAIT_S = 60.0


class Process:
    """A service from its first line on. Whatever a test does to it, it is gone in the end."""

    def __init__(self, *command: str, env: dict[str, str] | None = None) -> None:
        """`env`: its environment; ours where none is given."""
        self.popen = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        assert self.popen.stdout
        line = self.popen.stdout.readline()
        if " listening on " not in line:
            _, err = self.popen.communicate(timeout=WAIT_S)
            raise AssertionError(f"it did not start: {line}{err}")
        self.role, self.worker_id, *_, self.address = line.split()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Status and what it logged, once it has ended."""
        _, err = self.popen.communicate(timeout=WAIT_S)
        return self.popen.returncode, err

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate(timeout=WAIT_S)


def router_process(url: str, shard: str, *flags: str) -> Process:
    return Process("-m", "services.router", *router_flags(url, shard), *flags)


def router_flags(url: str, shard: str) -> list[str]:
    quick = (
        "--heartbeat-s",
        "0.1",
        "--ttl-s",
        "2",
        "--session-heartbeat-s",
        "0.1",
        "--session-silent-s",
        "1",
    )
    return ["--redis-url", url, "--shard", shard, "--model", "toy", "--worker-id", "router-0", *quick]


def decode_process(url: str, shard: str, name: str) -> Process:
    return Process("-m", "tests.support.fake_decode_process", url, shard, name)


def refused(*flags: str) -> tuple[int, str]:
    """Status and last words of a router that must not start."""
    found = subprocess.run(
        [sys.executable, "-m", "services.router", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert found.stdout == ""
    return found.returncode, found.stderr
