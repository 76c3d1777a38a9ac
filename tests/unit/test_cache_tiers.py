"""The brain of the cache, case by case. `test_cache_tiers_model.py` runs it against a naive model."""

from itertools import count

import pytest

from diptych.domain.errors import Internal
from diptych.domain.ids import ChunkHash
from services.cache.arena import ALIGN
from services.cache.tiers import Chunk, HostTier, Miss, Placed, Refusal, TierAudit

LEASE_S = 10.0
lease_ids = count(1)


def tier(units: int, *, max_fills: int = 4, max_leases: int = 8) -> HostTier:
    return HostTier(units * ALIGN, max_fills, max_leases, LEASE_S)


def chunk(name: str, units: int = 1, fingerprint: str = "llama") -> Chunk:
    return Chunk(ChunkHash(name.encode().ljust(16)), fingerprint, 256, units * ALIGN, b"digest".ljust(16))


def store(held: HostTier, *chunks: Chunk, now: float = 0.0) -> list[ChunkHash]:
    """Admits and lands each; returns what was evicted."""
    evicted: list[ChunkHash] = []
    for each in chunks:
        admission = held.admit(each, now)
        assert admission.placed, admission
        held.landed(each.name)
        evicted += admission.evicted
    return evicted


def lend(held: HostTier, wanted: Chunk, now: float = 0.0, lease_s: float = LEASE_S) -> int:
    lease_id = next(lease_ids)
    assert isinstance(held.lend(wanted.name, wanted.fingerprint, lease_id, now, lease_s), Placed)
    return lease_id


def assert_empty(held: HostTier, now: float) -> None:
    """Nothing is left once the cache is dropped."""
    held.drop(now)
    audit = held.audit(now)
    assert audit == TierAudit(0, 0, 0, 0, 0, audit.total_bytes)
    held.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    held = tier(3)
    a, b, c, d = (chunk(name) for name in "abcd")
    assert store(held, a, b, c) == []
    held.give_back(lend(held, a), 0.0)
    assert store(held, d) == [b.name]
    assert held.names() == (c.name, a.name, d.name)
    assert_empty(held, 0.0)


def test_an_offer_of_what_is_held_counts_as_use() -> None:
    held = tier(2)
    a, b, c = (chunk(name) for name in "abc")
    store(held, a, b)
    assert held.admit(a, 0.0).refusal is Refusal.HELD
    assert store(held, c) == [b.name]
    assert_empty(held, 0.0)


def test_a_chunk_being_read_is_neither_lent_nor_offered_again() -> None:
    held = tier(2)
    a = chunk("a")
    assert held.admit(a, 0.0).placed
    assert held.admit(a, 0.0).refusal is Refusal.HELD
    assert held.lend(a.name, a.fingerprint, 1, 0.0, LEASE_S) is Miss.FILLING
    assert held.names() == ()
    held.failed(a.name)
    assert held.lend(a.name, a.fingerprint, 1, 0.0, LEASE_S) is Miss.ABSENT
    assert_empty(held, 0.0)


def test_a_read_ends_once() -> None:
    held = tier(2)
    a = chunk("a")
    store(held, a)
    for end in (held.landed, held.failed):
        with pytest.raises(Internal, match="no read"):
            end(a.name)
    assert_empty(held, 0.0)


def test_what_is_pinned_or_being_read_is_never_evicted() -> None:
    held = tier(2)
    a, b, c = (chunk(name) for name in "abc")
    store(held, a)
    lease = lend(held, a)
    held.admit(b, 0.0)
    assert held.admit(c, 0.0).refusal is Refusal.NO_ROOM
    held.give_back(lease, 0.0)
    assert held.admit(c, 0.0).evicted == (a.name,)
    for each in (b, c):
        held.landed(each.name)
    assert_empty(held, 0.0)


def test_two_leases_pin_until_the_last_ends() -> None:
    held = tier(1)
    a, b = chunk("a"), chunk("b")
    store(held, a)
    first, second = lend(held, a, lease_s=1.0), lend(held, a, lease_s=5.0)
    assert held.give_back(first, 0.5)
    assert held.admit(b, 4.9).refusal is Refusal.NO_ROOM
    assert store(held, b, now=5.0) == [a.name]
    assert not held.give_back(second, 5.0)
    assert_empty(held, 5.0)


def test_a_lease_is_no_longer_than_allowed() -> None:
    held = tier(1)
    a = chunk("a")
    store(held, a)
    lend(held, a, lease_s=1e9)
    assert held.audit(LEASE_S - 0.1).leases == 1
    assert held.audit(LEASE_S).leases == 0
    assert_empty(held, LEASE_S)


def test_leases_are_bounded() -> None:
    held = tier(1, max_leases=2)
    a = chunk("a")
    store(held, a)
    lend(held, a)
    lend(held, a)
    assert held.lend(a.name, a.fingerprint, 99, 0.0, LEASE_S) is Miss.LEASES
    lend(held, a, now=LEASE_S)
    assert_empty(held, 2 * LEASE_S)


def test_a_lease_id_is_used_once_at_a_time() -> None:
    held = tier(1)
    a = chunk("a")
    store(held, a)
    lease = lend(held, a)
    with pytest.raises(Internal, match="in use"):
        held.lend(a.name, a.fingerprint, lease, 0.0, LEASE_S)
    assert held.give_back(lease, 0.0)
    assert_empty(held, 0.0)


def test_an_unknown_lease_changes_nothing() -> None:
    held = tier(1)
    a = chunk("a")
    store(held, a)
    lease = lend(held, a)
    assert not held.give_back(lease + 1000, 0.0)
    assert held.audit(0.0).lent == 1
    assert held.give_back(lease, 0.0)
    assert not held.give_back(lease, 0.0)
    assert_empty(held, 0.0)


def test_reads_under_way_are_bounded() -> None:
    held = tier(4, max_fills=2)
    for name in "ab":
        assert held.admit(chunk(name), 0.0).placed
    assert held.admit(chunk("c"), 0.0).refusal is Refusal.BUSY
    held.failed(chunk("a").name)
    assert held.admit(chunk("c"), 0.0).placed
    for name in "bc":
        held.failed(chunk(name).name)
    assert_empty(held, 0.0)


def test_a_budget_too_small_for_anything() -> None:
    held = tier(1)
    assert held.admit(chunk("a", units=2), 0.0).refusal is Refusal.TOO_LARGE
    assert held.audit(0.0) == TierAudit(0, 0, 0, 0, 0, ALIGN)
    assert_empty(held, 0.0)


def test_another_layout_under_the_same_name_is_foreign() -> None:
    held = tier(2)
    ours, theirs = chunk("a"), chunk("a", fingerprint="gemma")
    store(held, ours)
    assert held.admit(theirs, 0.0).refusal is Refusal.FOREIGN
    assert held.lend(theirs.name, theirs.fingerprint, 1, 0.0, LEASE_S) is Miss.FOREIGN
    assert held.names() == (ours.name,)
    assert_empty(held, 0.0)


def test_dropping_spares_what_is_pinned_or_being_read() -> None:
    held = tier(3)
    a, b, c = (chunk(name) for name in "abc")
    store(held, a, b)
    held.admit(c, 0.0)
    lease = lend(held, a)
    assert held.drop(0.0) == (b.name,)
    assert held.names() == (a.name,)
    held.landed(c.name)
    assert held.give_back(lease, 1.0)
    assert set(held.drop(1.0)) == {a.name, c.name}
    assert_empty(held, 1.0)


def test_an_old_chunk_that_would_make_no_room_is_spared() -> None:
    # │ a │ pinned │ b  b │ free │: for three units, a is older but of no use; b and the free unit are.
    held = tier(5)
    a, pinned, b = chunk("a"), chunk("pinned"), chunk("b", units=2)
    store(held, a, pinned, b)
    lease = lend(held, pinned)
    assert store(held, chunk("c", units=3)) == [b.name]
    assert a.name in held.names()
    held.give_back(lease, 0.0)
    assert_empty(held, 0.0)


def test_eviction_that_would_not_help_does_not_happen() -> None:
    held = tier(4)
    a, pinned, b = chunk("a"), chunk("pinned"), chunk("b", units=2)
    store(held, a, pinned, b)
    lend(held, pinned)
    assert held.admit(chunk("c", units=3), 0.0).refusal is Refusal.NO_ROOM
    assert set(held.names()) == {a.name, pinned.name, b.name}
    assert_empty(held, LEASE_S)
