"""Golden stories: what happened, line by line, and under each line what came of it.

    arrive a 10+5            a command, at the beginning of a line
        place a on w0        what came of it, indented: written by the runner, held by the test

`pytest tests/scenarios --rewrite` writes the indented lines anew; the difference is then read in review.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

INDENT = "    "


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what came of each golden story anew")


def replay(story: str, run: Callable[[str], Iterable[str]]) -> str:
    """The story with what `run` says came of each command. Comments and empty lines stay as they are."""
    told: list[str] = []
    for line in story.splitlines():
        if line.startswith(INDENT):
            continue
        told.append(line)
        if line and not line.startswith("#"):
            told += [f"{INDENT}{outcome}" for outcome in run(line)]
    return "\n".join(told) + "\n"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, Callable[[str], Iterable[str]]], None]:
    """`golden(path, run)`: the story at `path` is what `run` makes of its commands."""

    def check(path: Path, run: Callable[[str], Iterable[str]]) -> None:
        story = path.read_text(encoding="utf-8")
        told = replay(story, run)
        if request.config.getoption("--rewrite"):
            path.write_text(told, encoding="utf-8")
        else:
            assert told == story

    return check
