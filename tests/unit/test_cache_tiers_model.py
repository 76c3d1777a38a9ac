"""The brain of the cache against a naive model, with the bytes: 1,000 random interleavings.

The model keeps one list of chunks in order of use, a dict of leases, and a real arena of bytes. A read
under way scribbles into its room, so that room given to two owners, or evicted under a reader, shows as wrong
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.domain.ids import ChunkHash
from services.cache.arena import ALIGN
from services.cache.tiers import Chunk, HostTier, Miss, Placed, Refusal, TierAudit

UNITS = 8
MAX_FILLS = 2
MAX_LEASES = 3
MAX_LEASE_S = 6.0
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 3, 5: 4, 6: 8, 7: 9}  # units of each chunk; the last never fits

Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["admit", "admit", "land", "land", "fail", "lend", "lend", "give_back", "wait", "drop"]
        ),
        st.integers(0, len(SIZES) - 1),
        st.integers(0, 9),
    ),
    min_size=20,
    max_size=60,
)


def chunk(index: int, fingerprint: str = "ours") -> Chunk:
    return Chunk(ChunkHash(bytes([index]) * 16), fingerprint, 256, SIZES[index] * ALIGN - 1, bytes(16))


@dataclass
class Model:
    """What must be true, in the simplest form that says it."""

    filling: dict[ChunkHash, Placed] = field(default_factory=dict)
    held: dict[ChunkHash, Placed] = field(default_factory=dict)  # least recently used first
    leases: dict[int, tuple[ChunkHash, float]] = field(default_factory=dict)
    data: bytearray = field(default_factory=lambda: bytearray(UNITS * ALIGN))

    def expire(self, now: float) -> None:
        for lease_id in [i for i, (_, end) in self.leases.items() if end <= now]:
            self.end(lease_id)

    def end(self, lease_id: int) -> None:
        name, _ = self.leases.pop(lease_id)
        if not self.pinned(name):
            self.held[name] = self.held.pop(name)

    def pinned(self, name: ChunkHash) -> bool:
        return any(leased == name for leased, _ in self.leases.values())

    def idle(self) -> list[ChunkHash]:
        return [name for name in self.held if not self.pinned(name)]

    def longest_run(self, evicted: set[ChunkHash]) -> int:
        """Bytes that would be free in one piece if these were evicted."""
        fixed = [*self.filling.values(), *(p for n, p in self.held.items() if n not in evicted)]
        edges = sorted((p.extent.offset, p.extent.end) for p in fixed)
        ends = [0, *(end for _, end in edges)]
        starts = [*(start for start, _ in edges), UNITS * ALIGN]
        return max(start - end for start, end in zip(starts, ends, strict=True))

    def write(self, placed: Placed, byte: int) -> None:
        start = placed.extent.offset
        self.data[start : start + placed.chunk.num_bytes] = bytes([byte]) * placed.chunk.num_bytes

    def check_bytes(self, placed: Placed) -> None:
        start = placed.extent.offset
        want = bytes([placed.chunk.name[0]]) * placed.chunk.num_bytes
        assert self.data[start : start + placed.chunk.num_bytes] == want


class Run:
    """One interleaving, on both."""

    def __init__(self) -> None:
        self.tier = HostTier(UNITS * ALIGN, MAX_FILLS, MAX_LEASES, MAX_LEASE_S)
        self.model = Model()
        self.now = 0.0
        self.next_lease = 1

    def admit(self, index: int, arg: int) -> None:
        model, offered = self.model, chunk(index, "theirs" if arg == 9 else "ours")
        model.expire(self.now)
        idle = model.idle()
        room = model.longest_run(set(idle))
        admission = self.tier.admit(offered, self.now)
        known = model.held.get(offered.name) or model.filling.get(offered.name)
        if known:
            same = known.chunk.fingerprint == offered.fingerprint
            assert admission.refusal is (Refusal.HELD if same else Refusal.FOREIGN)
            if same and offered.name in idle:
                model.held[offered.name] = model.held.pop(offered.name)
        elif len(model.filling) == MAX_FILLS:
            assert admission.refusal is Refusal.BUSY
        elif SIZES[index] > UNITS:
            assert admission.refusal is Refusal.TOO_LARGE
        elif SIZES[index] * ALIGN > room:
            assert admission.refusal is Refusal.NO_ROOM
        else:
            assert admission.placed
            self.check_evictions(admission.evicted, idle, SIZES[index])
            model.filling[offered.name] = admission.placed
            model.write(admission.placed, 0xFF)
            return
        assert not admission.placed
        assert not admission.evicted

    def check_evictions(self, evicted: tuple[ChunkHash, ...], idle: list[ChunkHash], units: int) -> None:
        assert set(evicted) <= set(idle)
        if evicted and units == 1:
            assert evicted == (idle[0],)  # any chunk makes room for the smallest: the oldest goes
        for name in evicted:
            rest = set(evicted) - {name}
            assert self.model.longest_run(rest) < units * ALIGN, "it would have done without this one"
        for name in evicted:
            del self.model.held[name]

    def land(self, index: int, arg: int) -> None:
        for name in list(self.model.filling)[:1]:
            placed = self.model.filling.pop(name)
            self.model.write(placed, name[0])
            self.model.held[name] = placed
            self.tier.landed(name)

    def fail(self, index: int, arg: int) -> None:
        for name in list(self.model.filling)[-1:]:
            del self.model.filling[name]
            self.tier.failed(name)

    def lend(self, index: int, arg: int) -> None:
        model, wanted = self.model, chunk(index)
        model.expire(self.now)
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        lent = self.tier.lend(wanted.name, wanted.fingerprint, lease_id, self.now, float(arg))
        known = model.held.get(wanted.name) or model.filling.get(wanted.name)
        if known is None:
            assert lent is Miss.ABSENT
        elif known.chunk.fingerprint != wanted.fingerprint:
            assert lent is Miss.FOREIGN
        elif wanted.name in model.filling:
            assert lent is Miss.FILLING
        elif len(model.leases) == MAX_LEASES:
            assert lent is Miss.LEASES
        else:
            assert lent == known
            model.leases[lease_id] = wanted.name, self.now + min(arg, MAX_LEASE_S)

    def give_back(self, index: int, arg: int) -> None:
        self.model.expire(self.now)
        lease_id = self.next_lease - 1 - arg
        known = lease_id in self.model.leases
        assert self.tier.give_back(lease_id, self.now) is known
        if known:
            self.model.end(lease_id)

    def wait(self, index: int, arg: int) -> None:
        self.now += arg / 4

    def drop(self, index: int, arg: int) -> None:
        if arg > 2:  # rarely: it ends what is interesting
            return
        self.model.expire(self.now)
        idle = self.model.idle()
        assert self.tier.drop(self.now) == tuple(idle)
        for name in idle:
            del self.model.held[name]

    def check(self) -> None:
        model = self.model
        self.tier.check_integrity()
        audit = self.tier.audit(self.now)
        model.expire(self.now)
        idle = model.idle()
        assert (audit.filling, audit.idle, audit.lent, audit.leases) == (
            len(model.filling),
            len(idle),
            len(model.held) - len(idle),
            len(model.leases),
        )
        assert set(self.tier.names()) == model.held.keys()
        assert self.tier.names()[: len(idle)] == tuple(idle)
        for placed in model.held.values():
            model.check_bytes(placed)

    def assert_empty(self) -> None:
        while self.model.filling:
            self.fail(0, 0)
        self.now += MAX_LEASE_S
        self.tier.drop(self.now)
        assert self.tier.audit(self.now) == TierAudit(0, 0, 0, 0, 0, UNITS * ALIGN)
        self.tier.check_integrity()


@settings(max_examples=1000)
@given(STEPS)
def test_interleavings_agree_with_the_model(steps: list[Step]) -> None:
    run = Run()
    for verb, index, arg in steps:
        getattr(run, verb)(index, arg)
        run.check()
    run.assert_empty()
