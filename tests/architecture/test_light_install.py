"""An install without the `engine` extra: the light rooms and services import where torch is absent."""

import subprocess
import sys

from tests.architecture.tree import ROOT

PROGRAM = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "safetensors", "gguf", "transformers"}:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Absent())
for room in ROOMS:
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, f"{room}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
            print(module.name)
"""

ROOMS = [
    "diptych.domain",
    "diptych.telemetry",
    "diptych.v1",
    "diptych.rpc",
    "diptych.client",
    "diptych.transfer",
    "diptych.store",
    "diptych.text",
    "diptych.cli",
    "services.router",
    "services.cache",
]


def test_the_light_rooms_import_without_torch() -> None:
    program = PROGRAM.replace("ROOMS", repr(ROOMS))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) > len(ROOMS)
