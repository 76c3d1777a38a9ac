"""The routers that a client may speak to. Any of them serves any request."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.domain.errors import InvalidField


class Addresses:
    """`host:port` of each, and which is spoken to now. Shared by threads: one reference changes at a time."""

    def __init__(self, given: str | Sequence[str]) -> None:
        """`given`: one or more, in a list or separated by commas. Raises InvalidField where there is none."""
        parts = given.split(",") if isinstance(given, str) else given
        self.all = tuple(part.strip() for part in parts)
        if not self.all or not all(self.all):
            raise InvalidField("address", f"must name a router (host:port), or several, is {given!r}")
        self.current = self.all[0]

    def __len__(self) -> int:
        return len(self.all)

    def leave(self, address: str) -> None:
        """The router at `address` did not answer: on to the next, unless somebody went on already."""
        if self.current == address:
            self.current = self.all[(self.all.index(address) + 1) % len(self.all)]

    def in_turn(self) -> tuple[str, ...]:
        """All of them, the one that is spoken to now first."""
        at = self.all.index(self.current)
        return (*self.all[at:], *self.all[:at])
