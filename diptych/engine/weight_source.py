"""Tensors by name, from safetensors files or from a seed, checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diptych.domain.errors import Unsupported
from diptych.engine.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
_HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old exports carry and that follow from the config."""


class WeightSource(Protocol):
    """Where a model's tensors come from."""

    @property
    def digest(self) -> bytes:
        """16 bytes that differ whenever a weight or the config differs."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, on the host, in its stored dtype."""

    def close(self) -> None:
        """Lets go of files. Idempotent."""


class WeightFiles:
    """A directory with `model.safetensors`, or with shards and their index.

    Raises Unsupported when a file is missing or torn, when a tensor is missing, superfluous, of another
    shape than `shapes` says, or of a dtype that is not served. `optional` names may be there or not.
    """

    def __init__(self, directory: Path, shapes: Shapes, optional: frozenset[str] = frozenset()) -> None:
        self._paths = _weight_files(directory)
        self._files = ExitStack()
        self._where: dict[str, tuple[Path, safe_open]] = {}
        for path in self._paths:
            self._open(path)
        self._check(directory, shapes, optional)

    @property
    def digest(self) -> bytes:
        """XXH3-128 over config.json and all weight files."""
        state = xxhash.xxh3_128()
        for path in (self._paths[0].parent / "config.json", *self._paths):
            with path.open("rb") as file:
                while piece := file.read(1 << 24):
                    state.update(piece)
        return state.digest()

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
        except FileNotFoundError as error:
            raise Unsupported(f"{path}: no such file") from error
        except (SafetensorError, OSError) as error:
            raise Unsupported(f"{path}: is torn or no safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in self._where:
                raise Unsupported(f"{path}: tensor {name} is in {self._where[name][0].name} as well")
            self._where[name] = (path, file)

    def _check(self, directory: Path, shapes: Shapes, optional: frozenset[str]) -> None:
        missing = sorted(shapes.keys() - self._where.keys())
        if missing:
            raise Unsupported(f"{directory}: tensor {missing[0]} is missing{_more(missing)}")
        known = shapes.keys() | optional
        extra = sorted(name for name in self._where.keys() - known if not name.endswith(_HARMLESS))
        if extra:
            path = self._where[extra[0]][0]
            raise Unsupported(f"{path}: tensor {extra[0]} does not belong to the architecture{_more(extra)}")
        for name, shape in shapes.items():
            path, file = self._where[name]
            part = file.get_slice(name)  # type: ignore[no-untyped-call]
            found, dtype = tuple(part.get_shape()), part.get_dtype()
            if found != shape:
                raise Unsupported(f"{path}: tensor {name} is {list(found)}, config.json says {list(shape)}")
            if dtype not in _DTYPES:
                raise Unsupported(f"{path}: tensor {name} is {dtype}; served: {', '.join(_DTYPES)}")


class RandomWeights:
    """Seeded random weights of a config's shapes, for machines without weights. Equal on every machine."""

    def __init__(self, config: ModelConfig, shapes: Shapes, seed: int) -> None:
        self._config = config
        self._shapes = shapes
        self._seed = seed

    @property
    def digest(self) -> bytes:
        """XXH3-128 over config and seed."""
        return xxhash.xxh3_128_digest(repr((self._config, self._seed)).encode())

    def tensor(self, name: str) -> Tensor:
        """Matrices with unit gain, norms near one, biases near zero."""
        name_seed = xxhash.xxh3_64_intdigest(f"{self._seed} {name}".encode())
        generator = torch.Generator().manual_seed(name_seed >> 1)
        shape = self._shapes[name]
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return values * float(shape[-1] ** -0.5)
        return values * 0.1 + (1.0 if "norm" in name else 0.0)

    def close(self) -> None:
        """Nothing is held open."""


def _weight_files(directory: Path) -> list[Path]:
    """The single file, or the shards that the index names."""
    index = directory / _INDEX
    if not index.exists():
        return [directory / _SINGLE]
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted({str(name) for name in shards})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unsupported(f"{index}: is no index of safetensors shards: {error!r}") from error
    outside = [name for name in names if Path(name).name != name]
    if outside or not names:
        raise Unsupported(f"{index}: must name files beside it, names {outside or 'none'}")
    return [directory / name for name in names]


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
