"""The hook of tests/conftest.py: where everything can be installed, a skip is a failure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT

SUITE = """
import pytest

def test_skips():
    pytest.importorskip("a_module_that_nobody_has")

@pytest.mark.gpu
def test_has_no_device():
    pytest.skip("no device")
"""


@pytest.mark.parametrize(
    ("required", "outcome"), [("", "2 skipped"), ("all", "1 failed, 1 skipped"), ("all,gpu", "2 failed")]
)
def test_a_skip_counts(tmp_path: Path, required: str, outcome: str) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: x\n  compose: x\n", encoding="utf-8")
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")

    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "DIPTYCH_REQUIRE": required},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert outcome in result.stdout.splitlines()[-1], result.stdout
