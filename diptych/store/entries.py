"""An entry of a cell's stream, as redis-py hands it over, and what it says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import msgspec

from diptych.domain.records import ClaimedJob, PrefillJob

Streams = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes] | None]]]]
"""redis-py's form of an XREADGROUP answer: streams, their entries, the entries' fields."""


class MalformedEntry(ValueError):
    """The entry is none of ours."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, unread. `claimed_unix_s` is the store's clock just after it was given to us."""

    entry_id: str
    fields: dict[bytes, bytes]
    claimed_unix_s: float

    def read(self) -> ClaimedJob:
        """The job. Raises MalformedEntry, whatever the bytes are."""
        try:
            job = msgspec.json.decode(self.fields[b"job"], type=PrefillJob)
            return ClaimedJob(self.entry_id, job, int(self.fields[b"deliveries"]))
        except (KeyError, ValueError) as error:
            raise MalformedEntry(f"entry {self.entry_id}: {error}") from error

    def is_past(self, deadline_unix_s: float) -> bool:
        """Whether a deadline had passed when the entry was claimed. 0: there is none."""
        return 0 < deadline_unix_s <= self.claimed_unix_s


def entry_of(answer: object, now: object) -> Entry | None:
    """What XREADGROUP with COUNT 1 and TIME answered; None when there was no entry."""
    if not answer:
        return None
    [(_, [(entry_id, fields)])] = cast("Streams", answer)
    seconds, microseconds = cast("tuple[int, int]", now)
    return Entry(entry_id.decode(), fields or {}, seconds + microseconds / 1e6)


def unix_ms(unix_s: float) -> int:
    """Whole milliseconds, rounded up. Raises ValueError for what is no moment."""
    if not math.isfinite(unix_s):
        raise ValueError(f"{unix_s} is no moment")
    return math.ceil(unix_s * 1000)
