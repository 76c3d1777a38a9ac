"""What a process says about the things that it holds, so that somebody can tell which of them should not be.

Nobody counts these up and down: whoever owns a thing lists it from its own live set when it is asked, the
oldest first and at most `MAX_OF_A_KIND` of each kind, together with how many there are in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from itertools import islice

MAX_OF_A_KIND = 32
"""Longest list of one kind. What should not be is old, and the oldest come first."""


@dataclass(frozen=True, slots=True)
class Held:
    """One thing that a process holds.

    `kind` is a word of a closed set: request · delivery (a request that the engine does not know) · last word
    (of an ended request, kept for whoever may ask) · job (on the bus) · attempt (a prefill) · read (of a
    chunk) · stream (of an attempt) · chunk (readable by others) · borrow (read from a lender) · loan (of or
    to somebody) · fill (a chunk that a cache reads).
    """

    kind: str
    name: str
    owner: str = ""
    """For whom. Empty where nobody is known."""
    age_s: float = 0.0
    num_blocks: int = 0
    ends_in_s: float | None = None
    """When it ends by itself; below 0: it should have. None: something else ends it."""


def bounded(*kinds: Iterable[Held]) -> list[Held]:
    """The first few of each kind."""
    return [held for kind in kinds for held in islice(kind, MAX_OF_A_KIND)]


def blocks_of(tables: Iterable[Sized]) -> int:
    """Blocks in the tables of all layer groups."""
    return sum(len(table) for table in tables)


def with_owners(held: Iterable[Held], owners: Mapping[str, str]) -> Iterator[Held]:
    """The same, and for whom, where `owners` knows that by name."""
    return (one if one.owner else replace(one, owner=owners.get(one.name, "")) for one in held)
