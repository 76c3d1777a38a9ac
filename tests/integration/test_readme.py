"""What the README shows is run as it stands there, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT
from tests.support.running_up import DEADLINE_S, RunningUp, run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:7400"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_its_python_runs_as_it_stands(tmp_path: Path) -> None:
    programs = blocks("python")
    assert len(programs) == 2
    with RunningUp(tmp_path) as up:
        for program in programs:
            assert ADDRESS in program
            done = subprocess.run(
                [sys.executable, "-W", "error", "-c", program.replace(ADDRESS, up.router)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert "local" in done.stdout.lower()


def test_its_commands_and_flags_exist(tmp_path: Path) -> None:
    for command, arguments in re.findall(r"^\.venv/bin/diptych (\w+)(.*?)(?:#.*)?$", README, re.MULTILINE):
        helped = run(tmp_path, command, "--help").stdout
        for flag in re.findall(r"--[a-z-]+", arguments):
            assert f" {flag} " in helped, f"diptych {command} {flag}"


def test_the_files_it_names_are_there() -> None:
    named = re.findall(r"\]\(([\w/.]+)\)", README)
    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).is_file()] == []
