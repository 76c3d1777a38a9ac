"""Tokenizers behind one Protocol: Hugging Face's `tokenizer.json`, and plain bytes for the toy model.

Text is defined by bytes: `decode(ids)` is the concatenation of every `token_bytes`, read as UTF-8 with
U+FFFD for what is none. That is what byte-level decoders do, and it makes incremental decoding exact
(`detokenize`). Control tokens have no bytes. A client's text never yields a control token: the vocabulary's
control tokens are reached only through `control_ids`, by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from diptych.domain.errors import InvalidField

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

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Ids of plain text, without `bos_ids`. "<|im_end|>" is ten characters here, not a control token.

        `continues`: the text follows a control token, so that no space is put before it where a vocabulary
        puts one before the first word only.
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

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """See Tokenizer."""
        return list(unicode_bytes(text))

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return decode_bytes(self, ids)

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer."""
        return bytes((token_id,)) if 0 <= token_id < 256 else b""


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, or the toy's for "toy". Raises Unsupported, naming the file."""
    if str(model) == TOY:
        return ByteTokenizer()
    from diptych.text.hf_tokenizer import HfTokenizer  # which is made of what is above

    return HfTokenizer(Path(model))


def unicode_bytes(text: str, field: str = "text") -> bytes:
    """`text` as UTF-8. Raises InvalidField(`field`) where it holds half of a surrogate pair, which has no
    UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(field, f"is not Unicode: a lone surrogate at character {error.start}") from None


def decode_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of `ids` by their bytes: what every tokenizer's `decode` is."""
    return b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", errors="replace")
