"""The house drawing, held: import-linter keeps the contracts of pyproject.toml, and refuses breaches."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.tree import PRODUCT, ROOT, python_files

BRAINS = "Brains are pure: no I/O, clock, chance, threads or stubs, directly or through what they import"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts on the packages under `root`."""
    program = "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run())"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--config", str(root / "pyproject.toml")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_every_contract_is_kept() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("path", "breach", "contract"),
    [
        ("services/decode/scheduler.py", "import time", "Brains are pure"),
        ("services/router/policy.py", "from os import path", "Brains are pure"),
        ("diptych/domain/errors.py", "import diptych.telemetry", "Imports point down"),
        ("services/router/policy.py", "import services.decode.scheduler", "Imports point down"),
        ("diptych/rpc/__init__.py", "import services.cache.tiers", "Imports point down"),
        ("diptych/engine/__init__.py", "import grpc", "The engine runs alone"),
        ("diptych/text/__init__.py", "import torch", "The light rooms"),
        ("services/cache/tiers.py", "import redis", "Only the store speaks to Redis"),
        ("services/prefill/scheduler.py", "import torch", "Services reach torch only"),
        ("diptych/engine/__init__.py", "import transformers", "Nothing that ships"),
    ],
)
def test_a_breach_is_refused(tmp_path: Path, path: str, breach: str, contract: str) -> None:
    for folder in PRODUCT:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    target = tmp_path / path
    target.write_text(f"{target.read_text(encoding='utf-8')}\n{breach}\n", encoding="utf-8")

    result = lint_imports(tmp_path)

    assert result.returncode == 1, result.stdout + result.stderr
    broken = [line for line in result.stdout.splitlines() if line.rstrip().endswith("BROKEN")]
    assert any(line.startswith(contract) for line in broken), result.stdout


def test_every_brain_is_under_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (named,) = (contract["source_modules"] for contract in contracts if contract["name"] == BRAINS)
    brains = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in python_files("services")
        if path.stem in {"policy", "scheduler", "tiers"}
    }
    assert brains == {name for name in named if name.startswith("services.")}
