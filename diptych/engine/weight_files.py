"""Tensors from safetensors files, checked before anything is loaded."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from diptych.domain.errors import Unsupported
from diptych.engine.model_directory import weight_files, weights_digest
from diptych.engine.model_shapes import Shapes, StoredTensor, check_tensors


class WeightFiles:
    """A directory with `model.safetensors`, or with shards and their index.

    Raises Unsupported when a file is missing or torn, when a tensor is missing, superfluous, of another
    shape than `shapes` says, or of a dtype that is not served. `optional` names may be there or not.
    """

    def __init__(self, directory: Path, shapes: Shapes, optional: frozenset[str] = frozenset()) -> None:
        self._directory = directory
        self._files = ExitStack()
        self._where: dict[str, tuple[Path, safe_open]] = {}
        with ExitStack() as undo:
            undo.push(self._files)
            for path in weight_files(directory):
                self._open(path)
            check_tensors(directory, {name: self._stored(name) for name in self._where}, shapes, optional)
            undo.pop_all()

    @property
    def digest(self) -> bytes:
        """See `weights_digest`."""
        return weights_digest(self._directory)

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name. Raises Unsupported when it cannot be read."""
        path, file = self._where[name]
        try:
            tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise Unsupported(f"{path}: tensor {name}: {error}") from error
        return tensor

    def close(self) -> None:
        """Closes the files. Idempotent."""
        self._where.clear()
        self._files.close()

    def _open(self, path: Path) -> None:
        try:
            file = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise Unsupported(f"{path}: is torn or no safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in self._where:
                raise Unsupported(f"{path}: tensor {name} is in {self._where[name][0].name} as well")
            self._where[name] = (path, file)

    def _stored(self, name: str) -> StoredTensor:
        path, file = self._where[name]
        part = file.get_slice(name)  # type: ignore[no-untyped-call]
        return StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
