"""GGUF -> an ordinary Hugging Face directory: config.json, model.safetensors, tokenizer.json and their kin.

Full-precision tensors keep their values; quantised ones are dequantised and rounded once to bfloat16.
llama.cpp stores the rows of the query and key projections interleaved for its kind of rotary embedding;
they are put back. Run as a process of its own (`python -m diptych.engine.convert GGUF DIRECTORY`), so that
the memory this takes and the packages it imports stay out of services. Importable without torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from diptych.domain.errors import DiptychError, Unsupported
from diptych.engine import safetensors_file
from diptych.engine.gguf_config import generation_config, hf_name, model_config, tokenizer_config
from diptych.engine.gguf_tokenizer import build_tokenizer
from diptych.engine.safetensors_file import TensorSpec

Report = Callable[[int, int], None]
"""Called with tensors written so far, and all of them."""


def convert(source: Path, directory: Path, report: Report = lambda done, total: None) -> None:
    """Converts `source` into the existing, empty `directory`.

    Raises Unsupported, naming `source`, when it is torn or anything but a Llama whose parts are all served.
    """
    reader = _open(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    specs = {tensor.name: _spec(tensor, source) for tensor in reader.tensors}
    config = model_config(fields, specs, str(source))
    build_tokenizer(fields, str(source)).save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation_config(fields))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(fields))
    arrays = _arrays(reader, config, source, report)
    safetensors_file.write(directory / "model.safetensors", list(specs.values()), arrays)


def _open(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except OSError as error:
        raise Unsupported(f"{source}: can't be read: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        # What the reader raises on bytes that end early or make no sense.
        raise Unsupported(f"{source}: torn, or not a GGUF file ({error}): copy or fetch it again") from None


def _spec_dtype(tensor: gguf.ReaderTensor) -> str:
    kept = {gguf.GGMLQuantizationType.F32: "F32", gguf.GGMLQuantizationType.F16: "F16"}
    return kept.get(tensor.tensor_type, "BF16")


def _spec(tensor: gguf.ReaderTensor, source: Path) -> TensorSpec:
    name = hf_name(tensor.name)
    if name is None:
        raise Unsupported(f"{source}: tensor {tensor.name!r} is not one of a Llama that is served")
    return TensorSpec(name, _spec_dtype(tensor), tuple(int(n) for n in reversed(tensor.shape)))


def _arrays(
    reader: gguf.GGUFReader, config: dict[str, Any], source: Path, report: Report
) -> Iterator[NDArray[np.generic]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for done, tensor in enumerate(reader.tensors):
        report(done, len(reader.tensors))
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)  # [rows, columns] or [columns]
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise Unsupported(f"{source}: tensor {tensor.name!r} has a format not served: {kind}") from None
        if not np.isfinite(values).all():
            raise Unsupported(f"{source}: torn: tensor {tensor.name!r} holds values that are not finite")
        for part, num_heads in heads.items():
            if f".{part}." in tensor.name:
                values = _uninterleave(values, num_heads)
        dtype = _spec_dtype(tensor)
        if dtype == "BF16":
            yield to_bfloat16(values)
        else:
            yield values.astype(np.float16 if dtype == "F16" else np.float32)
    report(len(reader.tensors), len(reader.tensors))


def _uninterleave(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """From llama.cpp's rotary pairs (2i, 2i + 1) back to Hugging Face's (i, i + dim / 2)."""
    # shape of `rows`: heads * dim, columns
    num_rows, num_columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even. Finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """`GGUF DIRECTORY`: converts, and says on stdout how far it is or why not, one JSON object a line."""
    source, directory = map(Path, arguments)
    try:
        convert(source, directory, lambda done, total: _say({"done": done, "total": total}))
    except DiptychError as error:
        _say({"failure": type(error).__name__, "message": str(error)})
        return 1
    return 0


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
