"""How a service process ends: asked once, asked twice, told something wrong, with its parent."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.rpc_fixtures import DEADLINE_S

SERVICE = """
import asyncio, sys
from diptych.domain.errors import InvalidField, StoreUnavailable
from diptych.rpc.process import run_service

async def main(leave):
    print("up", flush=True)
    await leave.wait()
    print("leaving", flush=True)
    END

sys.exit(run_service(main))
"""

PARENT = """
import os, subprocess, sys
child = "import os, sys; from diptych.rpc.process import die_with_parent; die_with_parent(int(sys.argv[1])); "
child += "print(os.getpid(), flush=True); sys.stdin.read()"
subprocess.run([sys.executable, "-c", child, str(os.getpid() + OFFSET)], stdin=0)
print("the child has ended", flush=True)
"""


@contextmanager
def python(program: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_once_it_leaves_in_order(number: signal.Signals) -> None:
    with python(SERVICE.replace("END", "return")) as service:
        assert line(service) == "up"
        service.send_signal(number)
        assert line(service) == "leaving"
        assert service.wait(DEADLINE_S) == 0


def test_asked_twice_it_leaves_now() -> None:
    with python(SERVICE.replace("END", "await asyncio.Event().wait()")) as service:
        assert line(service) == "up"
        service.send_signal(signal.SIGTERM)
        assert line(service) == "leaving"
        service.send_signal(signal.SIGTERM)
        assert service.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("end", "status", "last_line"),
    [
        ("raise InvalidField('listen', 'taken')", 2, "InvalidField: listen: taken"),
        ("raise StoreUnavailable('no answer')", 1, "StoreUnavailable: no answer"),
        ("raise KeyError('a bug')", 1, "KeyError: 'a bug'"),
    ],
)
def test_the_exit_status_says_whose_fault_it_was(end: str, status: int, last_line: str) -> None:
    with python(SERVICE.replace("END", end)) as service:
        assert line(service) == "up"
        service.send_signal(signal.SIGTERM)
        _, stderr = service.communicate(timeout=DEADLINE_S)
    assert service.returncode == status
    assert stderr.splitlines()[-1] == last_line
    assert ("Traceback" in stderr) == ("a bug" in end)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's service is Linux's")
def test_a_child_dies_with_its_parent() -> None:
    with python(PARENT.replace("OFFSET", "0")) as parent:
        assert int(line(parent)) != parent.pid
        parent.kill()
        # The pipe's other ends are the parent's and the child's: it closes when both are gone.
        assert parent.stdout is not None
        assert parent.stdout.read() == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's service is Linux's")
def test_a_child_whose_parent_died_first_does_not_start() -> None:
    with python(PARENT.replace("OFFSET", "1")) as parent:
        assert line(parent) == "the child has ended"
