"""Ids to text, one at a time, valid UTF-8 at every cut.

A token may end within a character. The bytes of an unfinished character are held back until they are
complete or cannot become so; then they come out, as the character or as U+FFFD, exactly as
`Tokenizer.decode` of all ids has them:

    "".join(push(i) for i in ids) + flush()  ==  tokenizer.decode(ids)

The state is at most three bytes, a function of the last tokens only, so that another process resumes from
the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from diptych.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns one output's ids into text as they come."""

    __slots__ = ("_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _Utf8(errors="replace")

    @classmethod
    def resume(cls, tokenizer: Tokenizer, ids: Sequence[int]) -> Detokenizer:
        """One that has already seen `ids` and given out their text."""
        self = cls(tokenizer)
        tail = b""
        for token_id in reversed(ids):
            tail = tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 3:
                break
        # A character's first byte can't be the middle of another: the last three bytes tell what is
        # unfinished.
        self._utf8.decode(tail[-3:])
        return self

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, possibly none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The end of the output: what is held can't be completed any more."""
        return self._utf8.decode(b"", final=True)
