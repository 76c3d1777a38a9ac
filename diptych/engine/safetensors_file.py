"""The safetensors container, read and written without loading it.

    8 bytes   length of the header, little-endian
    header    JSON: name -> {dtype, shape, data_offsets: [begin, end) in the data}; "__metadata__" is text
    data      the tensors, back to back

The `safetensors` package writes a file only from tensors that are all in memory, and knows no bfloat16
outside of torch; a GGUF is converted one tensor at a time. Loading weights stays that package's work.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych.domain.errors import Unsupported

_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's place in a file: dtype as safetensors names it ("BF16", "F32"), shape outermost first."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data. Raises KeyError for a dtype that is not served."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write(path: Path, specs: Sequence[TensorSpec], tensors: Iterable[NDArray[np.generic]]) -> None:
    """Writes `tensors`, which come in the order of `specs`, and syncs the file to disk.

    BF16 comes as uint16 bits. Raises ValueError when a tensor has not the bytes that its spec says.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.nbytes != spec.num_bytes:
                raise ValueError(f"{spec.name}: {tensor.nbytes} bytes, not {spec.num_bytes}")
            file.write(np.ascontiguousarray(tensor).data)
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> tuple[bytes, list[TensorSpec]]:
    """The header's bytes and what they describe. Raises Unsupported for a file that is torn or something
    else."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise Unsupported(f"{path}: torn, or not safetensors: {size} bytes, a header of {length}")
            text = file.read(length)
    except OSError as error:
        raise Unsupported(f"{path}: can't be read: {error.strerror}") from None
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        specs = [TensorSpec(name, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()]
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise Unsupported(f"{path}: torn, or not safetensors: its header is not readable") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise Unsupported(
            f"{path}: torn: {size} bytes, its header speaks of {expected} (copy or fetch it again)"
        )
    return text, specs
