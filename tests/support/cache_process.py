"""`python -m services.cache` as a supervisor starts it, and a worker process's end of the real channel."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import TracebackType
from typing import Self

from diptych.domain.ids import Cell, Epoch, WorkerId
from diptych.domain.ports import Region
from diptych.domain.records import ChannelEndpoint, Role, WorkerRecord
from tests.support.cache_rig import FINGERPRINT, WAIT_S


def free_port() -> int:
    """A port that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def spawn(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.cache", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refused(*flags: str) -> tuple[int, str]:
    """Status and last words of a start that must come to nothing, without a traceback."""
    with spawn(*flags) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert out == ""
    assert "Traceback" not in err
    return process.returncode, err


class CacheProcess:
    """One cache that serves. Whatever a test does to it, it is gone in the end."""

    def __init__(self, *flags: str) -> None:
        self._process = spawn(*flags)
        assert self._process.stdout
        line = self._process.stdout.readline().split()
        assert line[:1] == ["cache"], self.end(9)
        assert line[2:4] == ["listening", "on"]
        self.worker_id, self.address = line[1], line[4]

    def wait(self) -> tuple[int, str]:
        """Status and what was logged, once it has ended by itself."""
        _, err = self._process.communicate(timeout=WAIT_S)
        assert "Traceback" not in err, err
        return self._process.returncode, err

    def end(self, number: int) -> tuple[int, str]:
        """Sends a signal and waits for the end."""
        self._process.send_signal(number)
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate(timeout=WAIT_S)


def source_record(region: Region) -> WorkerRecord:
    """How a worker that serves `region` registers."""
    return WorkerRecord(
        WorkerId("decode"),
        Role.DECODE,
        Epoch(1),
        Cell("main"),
        "toy",
        FINGERPRINT,
        "127.0.0.1:1",
        (ChannelEndpoint(region.kind, region.address),),
    )
