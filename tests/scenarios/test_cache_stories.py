"""The cache's brain, as stories. Commands:

tier UNITS [FILLS [LEASES [SECONDS]]]   before anything else: room, reads at a time, loans, longest loan
at SECONDS                              the clock
offer NAME[*UNITS][<BEFORE][/LAYOUT] …  each is read and lands at once
begin NAME[*UNITS] · land NAME · fail NAME    the same, step by step
lend NAME[/LAYOUT] LEASE SECONDS · give_back LEASE
drop · show
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from diptych.domain.ids import ChunkHash
from services.cache.arena import ALIGN
from services.cache.tiers import Admission, Chunk, HostTier, Miss, TierAudit

STORIES = sorted(Path(__file__).parent.glob("cache_*.story"))


def chunk_of(word: str) -> Chunk:
    named, _, layout = word.partition("/")
    named, _, parent = named.partition("<")
    name, _, units = named.partition("*")
    before = ChunkHash(parent.encode()) if parent else None
    return Chunk(ChunkHash(name.encode()), layout or "llama", 256, int(units or 1) * ALIGN, b"", before)


def names_of(names: Iterable[ChunkHash]) -> str:
    return " ".join(name.decode() for name in names) or "nothing"


class Story:
    """Runs commands against one tier."""

    def __init__(self) -> None:
        self.tier = HostTier(4 * ALIGN, 2, 4, 60.0)
        self.now = 0.0

    def run(self, line: str) -> Iterator[str]:
        command, *words = line.split()
        yield from getattr(self, f"do_{command}")(*words)
        self.tier.check_integrity()

    def do_tier(self, units: str, fills: str = "2", leases: str = "4", seconds: str = "60") -> Iterable[str]:
        self.tier = HostTier(int(units) * ALIGN, int(fills), int(leases), float(seconds))
        return ()

    def do_at(self, seconds: str) -> Iterable[str]:
        self.now = float(seconds)
        return ()

    def do_offer(self, *words: str) -> Iterator[str]:
        for word in words:
            admission = self.tier.admit(chunk_of(word), self.now)
            yield from self.told(word, admission)
            if admission.placed:
                self.tier.landed(chunk_of(word).name)

    def do_begin(self, word: str) -> Iterator[str]:
        yield from self.told(word, self.tier.admit(chunk_of(word), self.now))

    def do_land(self, word: str) -> Iterable[str]:
        self.tier.landed(chunk_of(word).name)
        return ()

    def do_fail(self, word: str) -> Iterable[str]:
        self.tier.failed(chunk_of(word).name)
        return ()

    def do_lend(self, word: str, lease: str, seconds: str) -> Iterator[str]:
        wanted = chunk_of(word)
        lent = self.tier.lend(wanted.name, wanted.fingerprint, int(lease), self.now, float(seconds))
        yield f"miss: {lent.value}" if isinstance(lent, Miss) else f"at {lent.extent.offset // ALIGN}"

    def do_give_back(self, lease: str) -> Iterator[str]:
        yield "ended" if self.tier.give_back(int(lease), self.now) else "unknown"

    def do_drop(self) -> Iterator[str]:
        yield f"dropped {names_of(self.tier.drop(self.now))}"

    def do_show(self) -> Iterator[str]:
        audit = self.tier.audit(self.now)
        yield f"{audit.used_bytes // ALIGN} of {audit.total_bytes // ALIGN} units, {audit.filling} being read"
        yield f"{audit.lent} lent under {audit.leases} leases"
        yield f"least recently used first, lent last: {names_of(self.tier.names())}"

    def told(self, word: str, admission: Admission) -> Iterator[str]:
        if admission.evicted:
            yield f"evict {names_of(admission.evicted)}"
        if admission.placed:
            yield f"{word} at {admission.placed.extent.offset // ALIGN}"
        elif admission.refusal:
            yield f"{word} refused: {admission.refusal.value}"

    def assert_empty(self) -> None:
        """Every story ends its own reads; its leases end with time, and what is left is dropped."""
        self.now += 3600.0
        self.tier.drop(self.now)
        audit = self.tier.audit(self.now)
        assert audit == TierAudit(0, 0, 0, 0, 0, audit.total_bytes)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, golden: Callable[[Path, Callable[[str], Iterable[str]]], None]) -> None:
    story = Story()
    golden(path, story.run)
    story.assert_empty()


def test_there_are_stories() -> None:
    assert len(STORIES) >= 4
