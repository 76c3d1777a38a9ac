"""Which chunk lies where, and which goes first. The brain of the cache: pure, with time as an argument.

A chunk that we know is in exactly one state:

             admit                landed              lend
    (absent) ──────▶ FILLING ──────────────▶ IDLE ────────────▶ LENT (leases ≥ 1)
                        │                     │ ▲                │
                        │ failed              │ └────────────────┘ the last lease given back, or ended
                        ▼                     ▼
                    (absent)               (absent)   evicted by `admit`, least recently used first, or `drop`

Who owns a chunk's bytes: the channel while FILLING (a read may write them until it has ended), nobody but us
while IDLE, its readers while LENT. Only what is IDLE is ever evicted or dropped. A lease bounds how long a
reader that died pins a chunk; a reader that comes later still gets bytes that its digest refuses.

Leases end by themselves: every call that is told the time first ends those that ran out, so there is no
timer. Lease ids come from the caller, who makes them unguessable and fresh; an earlier process's is just
unknown.

**What to evict.** Walking from the least recently used, chunks are freed on a trial copy of the arena until a
free run is long enough; then those inside that run are evicted, as far as it needs them. With chunks of one
size that is plain LRU; with mixed sizes it spares old chunks that lie where no room would come of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from diptych.domain.errors import Internal
from diptych.domain.ids import ChunkHash
from services.cache.arena import Arena, Extent, rounded


@dataclass(frozen=True, slots=True)
class Chunk:
    """What an offer tells of a chunk. `num_bytes` in the canonical wire layout, `digest` of these."""

    name: ChunkHash
    fingerprint: str
    num_tokens: int
    num_bytes: int
    digest: bytes
    parent: ChunkHash | None = None
    """The chunk before it, without which it is of no use: that one is never evicted first."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A chunk and its room in the arena; its bytes are the first `chunk.num_bytes` of it."""

    chunk: Chunk
    extent: Extent
    since: float = 0.0
    """When it was admitted."""


class Refusal(Enum):
    """Why an offered chunk is not taken."""

    HELD = "held"
    """It is here, or is being read."""
    FOREIGN = "foreign"
    """Another layout's chunk has this name. Names cover the layout, so somebody is wrong."""
    BUSY = "busy"
    """As many reads as allowed are under way."""
    TOO_LARGE = "too_large"
    """Larger than the whole budget."""
    NO_ROOM = "no_room"
    """What is pinned leaves no room for it."""


class Miss(Enum):
    """Why a chunk is not lent."""

    ABSENT = "absent"
    FILLING = "filling"
    FOREIGN = "foreign"
    LEASES = "leases"
    """As many leases as allowed are out."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What `admit` decided: room for the chunk, or why not; and what had to go for it."""

    placed: Placed | None = None
    refusal: Refusal | None = None
    evicted: tuple[ChunkHash, ...] = ()


@dataclass(frozen=True, slots=True)
class TierAudit:
    """Chunks by state, and bytes of the arena. `used_bytes` counts alignment."""

    filling: int
    idle: int
    lent: int
    leases: int
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Keeps a chunk readable until `end`."""

    name: ChunkHash
    begin: float
    end: float
    borrower: str


class HostTier:
    """Chunks in host memory (tier L2), within a budget of bytes. Not thread-safe; it holds no memory."""

    def __init__(self, budget_bytes: int, max_fills: int, max_leases: int, max_lease_s: float) -> None:
        self._arena = Arena(budget_bytes)
        self._max_fills = max_fills
        self._max_leases = max_leases
        self._max_lease_s = max_lease_s
        self._filling: dict[ChunkHash, Placed] = {}
        self._idle: OrderedDict[ChunkHash, Placed] = OrderedDict()  # least recently used first
        self._lent: dict[ChunkHash, tuple[Placed, set[int]]] = {}
        self._leases: dict[int, Lease] = {}
        self._next_end = math.inf
        """No lease ends before this."""

    def admit(self, chunk: Chunk, now: float) -> Admission:
        """Room to read `chunk` into, until `landed` or `failed`. Where it is refused, nothing changes but
        that a chunk held counts as used."""
        self._expire(now)
        placed = self._find(chunk.name)
        if placed:
            return Admission(refusal=self._refuse_held(placed, chunk))
        if len(self._filling) >= self._max_fills:
            return Admission(refusal=Refusal.BUSY)
        if rounded(chunk.num_bytes) > self._arena.num_bytes:
            return Admission(refusal=Refusal.TOO_LARGE)
        extent = self._arena.take(chunk.num_bytes)
        evicted: tuple[ChunkHash, ...] = ()
        if extent is None:
            evicted = self._make_room(rounded(chunk.num_bytes))
            extent = self._arena.take(chunk.num_bytes)
        if extent is None:
            return Admission(refusal=Refusal.NO_ROOM)
        placed = self._filling[chunk.name] = Placed(chunk, extent, now)
        return Admission(placed, None, evicted)

    def landed(self, name: ChunkHash) -> None:
        """The chunk's bytes are here and are right. Raises Internal unless it was being read."""
        self._idle[name] = self._end_fill(name)
        self._use(name)

    def failed(self, name: ChunkHash) -> None:
        """The read has ended without right bytes. Raises Internal unless it was being read."""
        self._arena.free(self._end_fill(name).extent)

    def lend(
        self, name: ChunkHash, fingerprint: str, lease_id: int, now: float, lease_s: float, borrower: str = ""
    ) -> Placed | Miss:
        """Pins a chunk for `lease_s` seconds, or as long as allowed. Raises Internal if the id is in use.
        `borrower` is only told by `leases`."""
        self._expire(now)
        if lease_id in self._leases:
            raise Internal("lend: the lease id is in use")
        placed = self._find(name)
        if placed is None:
            return Miss.ABSENT
        if placed.chunk.fingerprint != fingerprint:
            return Miss.FOREIGN
        if name in self._filling:
            return Miss.FILLING
        if len(self._leases) >= self._max_leases:
            return Miss.LEASES
        self._idle.pop(name, None)
        self._lent.setdefault(name, (placed, set()))[1].add(lease_id)
        lease = self._leases[lease_id] = Lease(name, now, now + min(lease_s, self._max_lease_s), borrower)
        self._next_end = min(self._next_end, lease.end)
        return placed

    def give_back(self, lease_id: int, now: float) -> bool:
        """Ends a lease. False, and nothing changes, when there is none of this id: it ended, or never was."""
        self._expire(now)
        if lease_id not in self._leases:
            return False
        self._end_lease(lease_id)
        return True

    def drop(self, now: float) -> tuple[ChunkHash, ...]:
        """Forgets every chunk that is neither lent nor being read, and tells which."""
        self._expire(now)
        return self._forget(list(self._idle))

    def names(self) -> tuple[ChunkHash, ...]:
        """The chunks that could be lent: what the directory should know of us."""
        return (*self._idle, *self._lent)

    def filling(self) -> tuple[Placed, ...]:
        """The chunks that are being read, the oldest first."""
        return tuple(self._filling.values())

    def leases(self, now: float) -> tuple[Lease, ...]:
        """Those that last, the oldest first."""
        self._expire(now)
        return tuple(self._leases.values())

    def audit(self, now: float) -> TierAudit:
        """Counts by state."""
        self._expire(now)
        total = self._arena.num_bytes
        used = total - self._arena.num_free_bytes
        return TierAudit(len(self._filling), len(self._idle), len(self._lent), len(self._leases), used, total)

    def check_integrity(self) -> None:
        """Raises Internal unless each chunk is in one state and has its own room, and leases and pins mirror
        each other."""
        self._arena.check_integrity()
        lent = {name: placed for name, (placed, _) in self._lent.items()}
        known = [*self._filling.items(), *self._idle.items(), *lent.items()]
        if len({name for name, _ in known}) != len(known):
            raise Internal("a chunk is in two states")
        if (
            sum(placed.extent.num_bytes for _, placed in known) + self._arena.num_free_bytes
            != self._arena.num_bytes
        ):
            raise Internal("the chunks do not add up to the room taken")
        pins = {lease_id: name for name, (_, leases) in self._lent.items() for lease_id in leases}
        if pins != {lease_id: lease.name for lease_id, lease in self._leases.items()}:
            raise Internal("leases and pins do not mirror each other")
        if any(not leases for _, leases in self._lent.values()):
            raise Internal("a chunk is lent without a lease")

    def _find(self, name: ChunkHash) -> Placed | None:
        if name in self._lent:
            return self._lent[name][0]
        return self._idle.get(name) or self._filling.get(name)

    def _refuse_held(self, placed: Placed, offered: Chunk) -> Refusal:
        if placed.chunk.fingerprint != offered.fingerprint:
            return Refusal.FOREIGN
        self._use(offered.name)
        return Refusal.HELD

    def _use(self, name: ChunkHash) -> None:
        """A chunk and, after it, each one before it count as used now, so that the head of a prompt goes
        last."""
        following: ChunkHash | None = name
        while following is not None and (placed := self._find(following)) is not None:
            if following in self._idle:
                self._idle.move_to_end(following)
            following = placed.chunk.parent

    def _make_room(self, num_bytes: int) -> tuple[ChunkHash, ...]:
        """Evicts the chunks of one run of `num_bytes`; none where the pinned ones leave no such run."""
        trial = self._arena.copy()
        walked: list[Placed] = []
        for placed in self._idle.values():
            walked.append(placed)
            run = trial.free(placed.extent)
            if run.num_bytes >= num_bytes:
                inside = [candidate for candidate in walked if run.holds(candidate.extent)]
                return self._forget(_needed(inside, run, num_bytes))
        return ()

    def _forget(self, names: Iterable[ChunkHash]) -> tuple[ChunkHash, ...]:
        gone = tuple(names)
        for name in gone:
            self._arena.free(self._idle.pop(name).extent)
        return gone

    def _end_fill(self, name: ChunkHash) -> Placed:
        placed = self._filling.pop(name, None)
        if placed is None:
            raise Internal(f"no read of {name.hex()} is under way")
        return placed

    def _end_lease(self, lease_id: int) -> None:
        name = self._leases.pop(lease_id).name
        placed, leases = self._lent[name]
        leases.discard(lease_id)
        if not leases:
            del self._lent[name]
            self._idle[name] = placed
            self._use(name)

    def _expire(self, now: float) -> None:
        if now < self._next_end:
            return
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.end <= now]:
            self._end_lease(lease_id)
        self._next_end = min((lease.end for lease in self._leases.values()), default=math.inf)


def _needed(inside: list[Placed], run: Extent, num_bytes: int) -> list[ChunkHash]:
    """Of the chunks inside a run that is long enough, those that must go for it to be.

    The most recently used are spared first. The last of `inside`, without which the run was too short, lies
    between what is spared on either side.
    """
    *others, last = inside
    start, end = run.offset, run.end
    for placed in reversed(others):
        extent = placed.extent
        if extent.offset < last.extent.offset and end - extent.end >= num_bytes:
            start = max(start, extent.end)
        elif extent.offset > last.extent.offset and extent.offset - start >= num_bytes:
            end = min(end, extent.offset)
    kept = Extent(start, end - start)
    return [placed.chunk.name for placed in inside if kept.holds(placed.extent)]
