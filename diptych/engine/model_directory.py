"""A Hugging Face model directory: is it whole and served, and which weights are these?

Reads headers and loads nothing, so that a command line or a router finds out in a fraction of a second what a
worker would find out while it loads.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import tokenizers
import xxhash

from diptych.domain.errors import Unsupported
from diptych.engine import safetensors_file, toy
from diptych.engine.config import ModelConfig, read_config
from diptych.engine.model_cache import cached_digest
from diptych.engine.model_shapes import HEAD, StoredTensor, check_tensors, shapes_of

_PIECE_BYTES = 8 << 20


def check(directory: Path) -> None:
    """Raises Unsupported, naming the file and what is served, unless the engine can be expected to load
    it."""
    config = read_config(directory)
    found = {
        spec.name: StoredTensor(path, spec.dtype, spec.shape)
        for path in weight_files(directory)
        for spec in safetensors_file.read_header(path)[1]
    }
    # A tied model's file may carry the head as a copy of the embeddings.
    check_tensors(directory, found, shapes_of(config), frozenset({HEAD}))
    _check_tokenizer(directory / "tokenizer.json", config)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, shards in order. Raises Unsupported when one is missing."""
    index = directory / "model.safetensors.index.json"
    names = _shards(index) if index.is_file() else ["model.safetensors"]
    for name in names:
        if not (directory / name).is_file():
            raise Unsupported(
                f"{directory / name}: missing (weights are read from safetensors, or from one .gguf file)"
            )
    return [directory / name for name in names]


def weights_digest(directory: Path) -> bytes:
    """16 bytes: identity of a model's configuration and weights; the toy runner's for "toy".

    The same in every process and on every machine; it differs for other weights under the same name. The
    content is hashed once and remembered in the user's cache until a file changes. Raises Unsupported like
    `check`.
    """
    if str(directory) == "toy":
        return toy.LAYOUT.model_digest
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unsupported(f"{directory / 'config.json'}: can't be read ({error})") from None
    files = weight_files(directory)
    content = cached_digest(files, lambda: _content_digest(files))
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode() + content, digest_size=16).digest()


def file_digest(path: Path) -> bytes:
    """16 bytes: XXH3-128 of a file's content, remembered until the file changes."""
    return cached_digest([path], lambda: _content_digest([path]))


def _content_digest(files: list[Path]) -> bytes:
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.digest()


def _shards(index: Path) -> list[str]:
    try:
        value = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unsupported(f"{index}: torn, or not JSON ({error})") from None
    entries = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise Unsupported(f"{index}: torn: it names no files")
    for name in entries.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise Unsupported(f"{index}: torn: it names {name!r}")
    return sorted(set(entries.values()))


def _check_tokenizer(path: Path, config: ModelConfig) -> None:
    if not path.is_file():
        raise Unsupported(f"{path}: missing (tokenizers are read from tokenizer.json only)")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever it can't parse
        raise Unsupported(f"{path}: torn, or not a tokenizer ({error})") from None
    last_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if last_id >= config.vocab_size:
        raise Unsupported(
            f"{path}: ids up to {last_id}, but the model's vocabulary has {config.vocab_size}: "
            "take the tokenizer.json that belongs to these weights"
        )
