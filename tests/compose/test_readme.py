"""The README's section on containers, run line by line, with the default model and the images as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.compose_stack import ROOT, Stack, build_images, require_engine

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

README = (ROOT / "README.md").read_text(encoding="utf-8")
PORT = "7400"
LINE_S = 600.0


def commands() -> list[str]:
    section = README.partition("\n## Containers\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"^```\n(docker compose up.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line.partition("#")[0].strip() for line in block.splitlines()]


def grpc_call() -> str:
    """The one call that the README shows for any gRPC client."""
    [program] = re.findall(r"^```python\n(import grpc\n.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return str(program)


@pytest.fixture
def stack() -> Iterator[Stack]:
    require_engine()
    build_images()
    with Stack() as stack:
        yield stack


def test_it_runs_line_by_line(stack: Stack) -> None:
    def shell(line: str) -> str:
        done = subprocess.run(
            ["sh", "-c", line.replace(PORT, str(stack.port))],
            cwd=ROOT, env=stack.env, capture_output=True, text=True,
            timeout=LINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    said: dict[str, str] = {}
    for number, line in enumerate(commands()):
        said[line] = shell(line)
        if number == 0:
            called = subprocess.run(
                [sys.executable, "-W", "error", "-c", grpc_call().replace(PORT, str(stack.port))],
                cwd=ROOT, capture_output=True, text=True, timeout=LINE_S, check=False,
            )  # fmt: skip
            assert "Paris" in called.stdout, called.stdout + called.stderr
    statuses = [text for line, text in said.items() if "diptych status" in line]
    assert [text.count("decode-") for text in statuses] == [4]
    answers = [text for line, text in said.items() if "diptych generate" in line]
    assert answers
    assert all(text.strip() for text in answers)
    assert "down -v" in list(said)[-1]
    assert stack.remains() == []
