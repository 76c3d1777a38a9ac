"""One output's text: ids in, text out, ended by a stop string or by the caller.

What has been given out after n tokens is a function of those tokens and the stop strings alone. A process
that takes over at token n (`resume`) therefore continues with no character lost or repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.text.detokenize import Detokenizer
from diptych.text.stops import StopStrings
from diptych.text.tokenizer import Tokenizer


class OutputText:
    """Detokenizes and watches for stop strings."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    @classmethod
    def resume(cls, tokenizer: Tokenizer, stops: Sequence[str], ids: Sequence[int]) -> OutputText:
        """One that has already been pushed `ids`, none of which ended the text."""
        self = cls(tokenizer, ())
        text = "".join(self._detokenizer.push(token_id) for token_id in ids)
        self._stops = StopStrings.resume(stops, text)
        return self

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Text that may go out, and the stop string that ended it, if one did."""
        return self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> tuple[str, str | None]:
        """The end: what was held. Even now the U+FFFD of an unfinished character may complete a stop
        string."""
        text, stopped = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush(), stopped
