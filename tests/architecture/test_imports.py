"""The house drawing, held: import-linter keeps the contracts of pyproject.toml, and refuses breaches."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.architecture.tree import PRODUCT, ROOT, python_files

BRAINS = "Brains are pure: no I/O, clock, chance, threads or stubs, directly or through what they import"


BREACHES = [
    ("services/decode/scheduler.py", "time", "Brains are pure"),
    ("services/router/policy.py", "os", "Brains are pure"),
    ("services/cache/tiers.py", "diptych.v1.common_pb2", "Brains are pure"),
    ("diptych/domain/ids.py", "diptych.telemetry", "Imports point down"),
    ("services/router/policy.py", "services.decode.scheduler", "Imports point down"),
    ("diptych/rpc/options.py", "services.cache.tiers", "Imports point down"),
    ("diptych/engine/memory.py", "grpc", "The engine runs alone"),
    ("diptych/text/stops.py", "torch", "The light rooms"),
    ("services/cache/tiers.py", "redis", "Only the store speaks to Redis"),
    ("services/prefill/scheduler.py", "torch", "Services reach torch only"),
    ("diptych/engine/pool.py", "transformers", "Nothing that ships"),
]
"""A file, what it must not import, and the contract that says so."""


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts on the packages under `root`."""
    program = "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run())"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", str(root / "pyproject.toml")],
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


def test_breaches_are_refused(tmp_path: Path) -> None:
    for folder in PRODUCT:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, target, _ in BREACHES:
        with (tmp_path / path).open("a", encoding="utf-8") as file:
            file.write(f"\nimport {target}\n")

    result = lint_imports(tmp_path)

    assert result.returncode == 1, result.stdout + result.stderr
    _, *sections = re.split(r"^(?=[^\n]+\n-{20,}$)", result.stdout, flags=re.MULTILINE)
    missed = [
        (path, target)
        for path, target, contract in BREACHES
        if not any(
            section.startswith(contract) and breach_line(path, target).search(section) for section in sections
        )
    ]
    assert not missed, result.stdout


def breach_line(path: str, target: str) -> re.Pattern[str]:
    """How a report names the import."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return re.compile(rf"{re.escape(module)} -> {re.escape(target)} \(")


def test_every_brain_is_under_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (named,) = (contract["source_modules"] for contract in contracts if contract["name"] == BRAINS)
    brains = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in python_files("services")
        if path.stem in {"policy", "scheduler", "tiers"}
    }
    assert brains, "the brains have other names now"
    assert brains <= set(named)
