"""Hugging Face's `tokenizer.json`, of the two kinds whose tokens are bytes of the text.

Byte-level BPE writes each byte as a printable character (GPT-2's alphabet). SentencePiece writes text with
"▁" for a space and falls back to tokens such as "<0x0A>".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from diptych.domain.errors import Unsupported
from diptych.text.model_json import read_json, token_text
from diptych.text.tokenizer import decode_bytes, unicode_bytes


class HfTokenizer:
    """A model directory's `tokenizer.json`."""

    def __init__(self, directory: Path) -> None:
        """Raises Unsupported, naming the file, for one that is missing, torn or of a kind not served."""
        path = directory / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise Unsupported(f"{path}: can't be read: {error.strerror}") from None
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever it can't parse
            raise Unsupported(f"{path}: torn, or not a tokenizer ({error})") from None
        _make_plain(self._tokenizer)
        self._continuing = _continuing(self._tokenizer, content)
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
        start = next((i for i in range(len(full)) if full[i : i + len(probe)] == probe), 0)
        return tuple(full[:start])

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """See Tokenizer. Lets other threads run meanwhile."""
        unicode_bytes(text)
        tokenizer = self._continuing if continues else self._tokenizer
        # `encode` holds the interpreter's lock throughout; the batch form does not.
        return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return decode_bytes(self, ids)

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
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode()


def _make_plain(tokenizer: tokenizers.Tokenizer) -> None:
    """Control tokens in text stay text; and a stored cut or padding is for training batches, not for us."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()


def _continuing(tokenizer: tokenizers.Tokenizer, content: bytes) -> tokenizers.Tokenizer:
    """What encodes text that follows a control token: the same, but where a space is put before the
    *first*."""
    pre = json.loads(tokenizer.pre_tokenizer.__getstate__()) if tokenizer.pre_tokenizer is not None else {}
    if pre.get("type") != "Metaspace" or pre.get("prepend_scheme") != "first":
        return tokenizer
    other: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(content)
    other.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=pre["replacement"], prepend_scheme="never", split=pre.get("split", True)
    )
    _make_plain(other)
    return other


def _eos_ids(directory: Path, tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """generation_config.json knows best (chat models often end on several ids), then config.json, then the
    token."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int for token_id in ids):
                raise Unsupported(
                    f"{directory / name}: eos_token_id is {value!r}, neither an id nor a list of them"
                )
            return frozenset(ids)
    token = token_text(read_json(directory / "tokenizer_config.json").get("eos_token"))
    found = tokenizer.token_to_id(token) if token else None
    return frozenset() if found is None else frozenset({found})


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
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
