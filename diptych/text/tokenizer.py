"""Tokenizers behind one Protocol: Hugging Face's `tokenizer.json`, and plain bytes for the toy model.

Text is defined by bytes: `decode(ids)` is the concatenation of every `token_bytes`, read as UTF-8 with
U+FFFD for what is none. That is what byte-level decoders do, and it makes incremental decoding exact
(`detokenize`). Control tokens have no bytes. A client's text never yields a control token: the vocabulary's
control tokens are reached only through `control_ids`, by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from diptych.domain.errors import InvalidField, Unsupported

TOY = "toy"
"""The model name, and model directory, of the toy model."""


class Tokenizer(Protocol):
    """What every tokenizer can do. Immutable; may be used from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to `vocab_size - 1`. A model may have rows for more: those have no bytes."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a sequence."""

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """What stands before a plain prompt. Chat templates bring their own."""

    @property
    def control_ids(self) -> Mapping[str, int]:
        """Control tokens by the text that a chat template writes them with."""

    @property
    def digest(self) -> bytes:
        """16 bytes that differ between tokenizers, the same in every process."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without `bos_ids`. "<|im_end|>" is ten characters here, not a control token.

        Raises InvalidField("text") for text that is not Unicode (a lone surrogate).
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without control tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; none for control tokens and ids past the vocabulary."""


class ByteTokenizer:
    """256 bytes and an end: ids are UTF-8, so that an emoji is four tokens. For the toy model."""

    vocab_size = 257
    eos_ids = frozenset({256})
    bos_ids: tuple[int, ...] = ()
    control_ids: Mapping[str, int] = {}
    digest = hashlib.blake2b(b"diptych bytes 257", digest_size=16).digest()

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return list(unicode_bytes(text))

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return _decode(self, ids)

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer."""
        return bytes((token_id,)) if 0 <= token_id < 256 else b""


class HfTokenizer:
    """A model directory's `tokenizer.json`."""

    def __init__(self, directory: Path) -> None:
        """Raises Unsupported, naming the file, for one that is missing, torn, or of a kind that is not
        served."""
        path = directory / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise Unsupported(f"{path}: can't be read: {error.strerror}") from None
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever it can't parse
            raise Unsupported(f"{path}: torn, or not a tokenizer ({error})") from None
        # Control tokens in text stay text; and a stored cut or padding is for training batches, not for us.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._byte_level = _is_byte_level(self._tokenizer, path)
        self._bytes_by_id: dict[int, bytes] = {}
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids: Mapping[str, int] = {t.content: i for i, t in added.items() if t.special}
        self._control = frozenset(self.control_ids.values())
        self._added = {i: t.content.encode() for i, t in added.items() if not t.special}
        self.vocab_size: int = max(self._tokenizer.get_vocab_size(), max(added, default=-1) + 1)
        self.eos_ids = _eos_ids(directory, self._tokenizer)
        self.digest = hashlib.blake2b(content, digest_size=16).digest()

    @cached_property
    def bos_ids(self) -> tuple[int, ...]:
        """See Tokenizer. Found by asking: the post-processor says it in many ways."""
        probe = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        start = next(i for i in range(len(full)) if full[i : i + len(probe)] == probe)
        return tuple(full[:start])

    def encode(self, text: str) -> list[int]:
        """See Tokenizer. Lets other threads run meanwhile."""
        unicode_bytes(text)
        # `encode` holds the interpreter's lock throughout; the batch form does not.
        return list(self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return _decode(self, ids)

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer."""
        found = self._bytes_by_id.get(token_id)
        if found is None:
            found = self._bytes_by_id[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None or token_id in self._control:
            return b""
        if self._byte_level:
            return b"".join(_BYTES[c] if c in _BYTES else c.encode() for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, or the toy's for "toy". Raises Unsupported, naming the file."""
    return ByteTokenizer() if str(model) == TOY else HfTokenizer(Path(model))


def unicode_bytes(text: str, field: str = "text") -> bytes:
    """`text` as UTF-8. Raises InvalidField(`field`) where it holds half of a surrogate pair, which has no
    UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(field, f"is not Unicode: a lone surrogate at character {error.start}") from None


def read_json(path: Path) -> dict[str, Any]:
    """An object from a model's JSON file; empty where the file is missing. Raises Unsupported for a torn
    one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path}: torn, or not JSON ({error})") from None
    if not isinstance(value, dict):
        raise Unsupported(f"{path}: not a JSON object")
    return value


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", errors="replace")


def _eos_ids(directory: Path, tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """generation_config.json knows best (chat models often end on several ids), then config.json, then the
    token."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    token = token_text(read_json(directory / "tokenizer_config.json").get("eos_token"))
    found = tokenizer.token_to_id(token) if token else None
    return frozenset() if found is None else frozenset({found})


def token_text(entry: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _is_byte_level(tokenizer: tokenizers.Tokenizer, path: Path) -> bool:
    """True for byte-level BPE, False for SentencePiece with byte fallback."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    kinds = {step["type"] for step in [decoder, *decoder.get("decoders", [])] if "type" in step}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise Unsupported(
        f"{path}: decoder {sorted(kinds)} is not served (served: ByteLevel, ByteFallback, Metaspace)"
    )


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable character for each byte, inverted (Radford et al. 2019, `encoder.py`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    chars = {chr(b): bytes((b,)) for b in printable}
    return chars | {chr(256 + i): bytes((b,)) for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
