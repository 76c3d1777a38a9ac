"""What the architecture tests look at: our Python files, and which of them a generator wrote."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("diptych", "services")
OWN = (*PRODUCT, "tests", "protos", "bench")


def python_files(*folders: str) -> list[Path]:
    """Every file under these folders that a person wrote, in a stable order."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")))
