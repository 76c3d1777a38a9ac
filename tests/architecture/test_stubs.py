"""What is checked in under diptych/v1 is what the pinned generator writes from protos/, byte for byte."""

import subprocess
import sys
from pathlib import Path

from tests.architecture.tree import ROOT


def stubs(root: Path) -> dict[str, bytes]:
    files = (path for pattern in ("*.py", "*.pyi") for path in (root / "diptych/v1").glob(pattern))
    return {path.name: path.read_bytes() for path in files if path.name != "__init__.py"}


def test_stubs_are_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "protos/generate.py"), str(tmp_path)], check=True, timeout=50)

    written, checked_in = stubs(tmp_path), stubs(ROOT)

    assert written, "protos/diptych/v1 holds no proto"
    assert sorted(written) == sorted(checked_in), "run `make proto`"
    assert [name for name in written if written[name] != checked_in[name]] == [], "run `make proto`"
