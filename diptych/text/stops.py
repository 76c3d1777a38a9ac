"""Stop strings, found however the text is cut.

Text is given out as soon as it can't be the beginning of a stop string; only the longest suffix that is a
proper prefix of one is held. Of several stop strings the one that *completes* first ends the text (of those
that complete together, the longest): the one rule that does not depend on how the text was cut into tokens.
Matching is Knuth, Morris and Pratt's ("Fast pattern matching in strings", 1977), one automaton a stop
string: constant time a character, whatever the strings.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one output's text."""

    __slots__ = ("_failures", "_held", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings (`SamplingParams.check`). Raises ValueError if one is."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""

    @classmethod
    def resume(cls, stops: Sequence[str], text: str) -> StopStrings:
        """One that has already seen `text`, in which no stop string was complete, and holds what it must."""
        self = cls(stops)
        longest = max(map(len, stops), default=1)
        self.push(text[len(text) - longest + 1 :] if longest <= len(text) else text)
        return self

    @property
    def held(self) -> str:
        """Text that was pushed and not yet given out."""
        return self._held

    def push(self, delta: str) -> tuple[str, str | None]:
        """Takes more text; gives what may go out, and the stop string that ended the text, if one did.

        After a stop the rest of `delta` is dropped and nothing is held.
        """
        if not self._stops:
            return delta, None
        text = self._held + delta
        for position in range(len(self._held), len(text)):
            for i, stop in enumerate(self._stops):
                if self._advance(i, text[position]):
                    self._held = ""
                    self._matched = [0] * len(self._stops)
                    return text[: position + 1 - len(stop)], stop
        hold = max(self._matched)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The end of the output without a stop: gives what is held."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, i: int, char: str) -> bool:
        """Feeds stop string `i` one character; True when it is complete."""
        stop, failures, matched = self._stops[i], self._failures[i], self._matched[i]
        while matched and stop[matched] != char:
            matched = failures[matched - 1]
        if stop[matched] == char:
            matched += 1
        self._matched[i] = matched
        return matched == len(stop)


def _failure_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[matched] != stop[i]:
            matched = table[matched - 1]
        if stop[matched] == stop[i]:
            matched += 1
        table[i] = matched
    return table
