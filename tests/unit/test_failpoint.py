"""Failpoints: off by default, and each line acts once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running_up import wait_until

PROGRAM = "from diptych.rpc.failpoint import failpoint; failpoint('a.b'); failpoint('c.d'); print('passed')"


def run(path: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {"DIPTYCH_FAILPOINTS": str(path)} if path else {}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_nothing_happens_unless_armed(tmp_path: Path) -> None:
    assert run(None).stdout == "passed\n"
    assert run(tmp_path / "missing").stdout == "passed\n"


@pytest.mark.parametrize("line", ["c.d kill", "a.b kill"])
def test_a_kill_happens_once(tmp_path: Path, line: str) -> None:
    path = tmp_path / "points"
    path.write_text(line)
    assert run(path).returncode == -signal.SIGKILL
    assert run(path).stdout == "passed\n"


def test_who_is_held_goes_on_when_it_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "points"
    path.write_text("a.b hold")
    held = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={"DIPTYCH_FAILPOINTS": str(path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with held:
        taken = tmp_path / f"points.taken-{held.pid}"
        wait_until(taken.exists, "it is held", 60.0)
        assert held.poll() is None
        taken.unlink()
        assert held.communicate(timeout=60) == ("passed\n", None)


def test_an_error_is_one_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "points"
    path.write_text("c.d error")
    assert "Internal: failpoint c.d" in run(path).stderr
