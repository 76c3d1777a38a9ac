"""An engine stays on the cores that it is given."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from diptych.domain.errors import InvalidField
from diptych.engine.open import pin
from diptych.worker.settings import cores_of

PROGRAM = """
import os
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings
core = max(os.sched_getaffinity(0))
open_runner(EngineSettings("toy", cores=(core,)))
assert os.sched_getaffinity(0) == {core}
"""


@pytest.mark.parametrize(
    ("text", "cores"), [("", ()), ("0", (0,)), ("2-4", (2, 3, 4)), ("0-1,6,9-9", (0, 1, 6, 9))]
)
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert cores_of(text) == cores


def test_opening_a_runner_pins_its_process() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_a_core_that_is_not_there() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(InvalidField, match="pin: core 100000 is not one that this process may use"):
        pin((min(before), 100000))
    pin(())
    assert os.sched_getaffinity(0) == before


def test_a_system_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(InvalidField, match="pin: this system"):
        pin((0,))
