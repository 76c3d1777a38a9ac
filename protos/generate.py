"""Writes the stubs of every `protos/diptych/v1/*.proto` under a root: messages, services, and types for both.

Called by `make proto` (root: the checkout) and by the test that compares what is checked in with what the
pinned generator writes.
"""

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent


class GenerationFailed(Exception):
    """protoc refused a file; it has printed which and why."""


def generate(root: Path) -> None:
    """Write `diptych/v1/*_pb2*.py(i)` under `root`. Raises `GenerationFailed`."""
    root.mkdir(parents=True, exist_ok=True)
    # The plugin of the interpreter that runs this, not whichever is first on PATH.
    mypy_plugin = Path(sys.executable).with_name("protoc-gen-mypy")
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={resources.files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={mypy_plugin}",
        f"--plugin=protoc-gen-mypy_grpc={mypy_plugin.with_name('protoc-gen-mypy_grpc')}",
        f"--python_out={root}",
        f"--grpc_python_out={root}",
        f"--mypy_out=quiet:{root}",
        f"--mypy_grpc_out=quiet:{root}",
        *(str(path) for path in sorted(PROTOS.glob("diptych/v1/*.proto"))),
    ]
    if protoc.main(arguments) != 0:
        raise GenerationFailed


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
