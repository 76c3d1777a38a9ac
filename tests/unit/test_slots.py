"""SlotRing: leases, generations, and that nothing is lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.domain.slots import Slot, SlotAudit, SlotRing


def take(ring: SlotRing[str], owner: str, now: float = 0.0, lease_s: float = 10.0) -> Slot[str]:
    slot = ring.take(owner, now, lease_s)
    assert slot is not None
    return slot


def test_slots_lie_side_by_side_and_run_out() -> None:
    ring: SlotRing[str] = SlotRing(3, 64)
    slots = [take(ring, "a") for _ in range(3)]
    assert [(slot.offset, slot.num_bytes) for slot in slots] == [(0, 64), (64, 64), (128, 64)]
    assert ring.num_bytes == 192
    assert ring.take("b", 0.0, 1.0) is None
    assert ring.audit() == SlotAudit(free=0, taken=3, total=3)


def test_a_stale_release_frees_nothing_from_under_the_next_owner() -> None:
    ring: SlotRing[str] = SlotRing(1, 8)
    first = take(ring, "a")
    assert ring.release(first)
    second = take(ring, "b")
    assert second.index == first.index
    assert not ring.release(first)
    assert not ring.renew(first, 5.0, 10.0)
    assert ring.holds(second)
    assert not ring.holds(first)
    assert ring.taken_by("b") == [second]


def test_the_slot_released_longest_ago_is_reused_first() -> None:
    ring: SlotRing[str] = SlotRing(3, 8)
    a, b = take(ring, "a"), take(ring, "b")
    ring.release(b)
    ring.release(a)
    assert [take(ring, "c").index for _ in range(3)] == [2, b.index, a.index]


def test_a_lease_ends_at_its_time_and_frees_nothing() -> None:
    ring: SlotRing[str] = SlotRing(2, 8)
    slot, forever = take(ring, "a", now=5.0, lease_s=2.0), take(ring, "a", lease_s=math.inf)
    assert ring.expired(6.9) == []
    assert ring.expired(7.0) == [slot]
    assert ring.num_free == 0
    assert ring.renew(slot, now=7.0, lease_s=1.0)
    assert ring.expired(7.5) == []
    (renewed,) = ring.expired(8.0)
    assert ring.release(renewed)
    assert not ring.release(slot)
    assert ring.taken_by("a") == [forever]


@given(st.lists(st.tuples(st.sampled_from(["take", "release", "again"]), st.integers(0, 9)), max_size=60))
def test_every_slot_is_free_or_taken_once(steps: list[tuple[str, int]]) -> None:
    ring: SlotRing[int] = SlotRing(4, 16)
    live: list[Slot[int]] = []
    dead: list[Slot[int]] = []
    for number, (verb, pick) in enumerate(steps):
        if verb == "take":
            slot = ring.take(number, float(number), 1.0)
            assert (slot is None) == (len(live) == 4)
            if slot is not None:
                assert slot.index not in {other.index for other in live}
                live.append(slot)
        elif verb == "release" and live:
            dead.append(live.pop(pick % len(live)))
            assert ring.release(dead[-1])
        elif verb == "again" and dead:
            assert not ring.release(dead[pick % len(dead)])
        ring.check_integrity()
        assert ring.audit() == SlotAudit(4 - len(live), len(live), 4)
        assert all(ring.taken_by(slot.owner) == [slot] and ring.holds(slot) for slot in live)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 8), (8, 0)])
def test_an_empty_ring_is_refused(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="a ring needs"):
        SlotRing(num_slots, slot_bytes)
