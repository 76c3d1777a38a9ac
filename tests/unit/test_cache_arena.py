"""The arena's books: whatever is taken and freed, runs tile it, never overlap, and join again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.domain.errors import Internal
from services.cache.arena import ALIGN, Arena, Extent, rounded

UNITS = 32


@pytest.mark.parametrize("num_bytes", [0, -ALIGN, ALIGN - 1, ALIGN + 1])
def test_an_arena_is_whole_units(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Arena(num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "size"), [(1, ALIGN), (ALIGN, ALIGN), (ALIGN + 1, 2 * ALIGN)], ids=["one", "unit", "over"]
)
def test_sizes_are_rounded_up(num_bytes: int, size: int) -> None:
    assert rounded(num_bytes) == size


def test_room_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        Arena(ALIGN).take(0)


def test_best_fit_spares_the_large_run() -> None:
    arena = Arena(10 * ALIGN)
    hole = arena.take(2 * ALIGN)
    assert hole is not None
    arena.take(ALIGN)
    arena.free(hole)  # free: 2 units, and 7 at the end
    assert arena.take(2 * ALIGN) == hole
    assert arena.take(7 * ALIGN) == Extent(3 * ALIGN, 7 * ALIGN)
    assert arena.take(1) is None


def test_only_what_is_taken_is_freed() -> None:
    arena = Arena(4 * ALIGN)
    extent = arena.take(ALIGN)
    assert extent is not None
    for wrong in (Extent(0, 2 * ALIGN), Extent(ALIGN, ALIGN)):
        with pytest.raises(Internal, match="not taken"):
            arena.free(wrong)
    arena.free(extent)
    with pytest.raises(Internal, match="not taken"):
        arena.free(extent)
    arena.check_integrity()


def test_a_copy_is_independent() -> None:
    arena = Arena(4 * ALIGN)
    extent = arena.take(ALIGN)
    assert extent is not None
    assert arena.copy().free(extent) == Extent(0, 4 * ALIGN)
    assert arena.num_free_bytes == 3 * ALIGN


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, UNITS * ALIGN // 3), st.integers(0, 99)), max_size=60)
)
def test_runs_tile_the_arena_and_join_again(steps: list[tuple[bool, int, int]]) -> None:
    arena = Arena(UNITS * ALIGN)
    taken: list[Extent] = []
    for is_take, num_bytes, pick in steps:
        if is_take:
            free_units = set(range(UNITS)) - {unit for e in taken for unit in units(e)}
            extent = arena.take(num_bytes)
            if extent is None:
                assert longest_run(free_units) < rounded(num_bytes) // ALIGN
            else:
                assert extent.num_bytes == rounded(num_bytes)
                assert set(units(extent)) <= free_units
                taken.append(extent)
        elif taken:
            extent = taken.pop(pick % len(taken))
            assert arena.free(extent).holds(extent)
        arena.check_integrity()
        assert arena.num_free_bytes == UNITS * ALIGN - sum(e.num_bytes for e in taken)
    while taken:
        arena.free(taken.pop())
    assert arena.take(UNITS * ALIGN) == Extent(0, UNITS * ALIGN)


def units(extent: Extent) -> range:
    return range(extent.offset // ALIGN, extent.end // ALIGN)


def longest_run(free_units: set[int]) -> int:
    longest = run = 0
    for unit in range(UNITS):
        run = run + 1 if unit in free_units else 0
        longest = max(longest, run)
    return longest
