"""Every channel moves the right bytes to the right place, and refuses what it must."""

import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from diptych.domain.errors import Draining, PeerLost, TransferFailed
from diptych.domain.ports import MemorySpan
from diptych.transfer.faults import EACH
from tests.contract.channel_rig import RIGS, Memory, Rig, Started, kv_threads, piece

MIB = 1 << 20


@pytest.fixture(params=list(RIGS))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = RIGS[request.param]()
    yield rig
    rig.close()
    assert kv_threads() == [], "a closed channel left threads"


@pytest.mark.parametrize("num_bytes", [1, 4097, MIB - 1, MIB, MIB + 1, 4 * MIB, 12 * MIB])
def test_all_bytes_arrive_and_none_elsewhere(rig: Rig, num_bytes: int) -> None:
    source, target = Memory.random(num_bytes), Memory(num_bytes)
    region = rig.open().register(source.span)
    assert (region.kind, region.num_bytes) == (rig.kind, num_bytes)
    assert Started(rig.open(), piece(region), target.span).end() is None
    assert np.array_equal(target.data, source.data)
    assert target.guards_hold()


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 1), (7, 3), (MIB - 1, MIB + 2), (3 * MIB - 1, 1)])
def test_a_part_of_a_region_can_be_read(rig: Rig, offset: int, num_bytes: int) -> None:
    source, target = Memory.random(3 * MIB), Memory(num_bytes)
    region = rig.open().register(source.span)
    assert Started(rig.open(), piece(region, offset, num_bytes), target.span).end() is None
    assert np.array_equal(target.data, source.data[offset : offset + num_bytes])
    assert target.guards_hold()


def test_sixteen_reads_at_once_from_two_peers(rig: Rig) -> None:
    sources = [Memory.random(5 * MIB, seed) for seed in range(2)]
    regions = [rig.open().register(source.span) for source in sources]
    reader = rig.open()
    targets = [Memory(MIB + i) for i in range(16)]
    reads = [
        Started(reader, piece(regions[i % 2], 1000 * i, MIB + i), target.span)
        for i, target in enumerate(targets)
    ]
    assert [read.end() for read in reads] == [None] * 16
    for i, target in enumerate(targets):
        assert np.array_equal(target.data, sources[i % 2].data[1000 * i : 1000 * i + MIB + i])
        assert target.guards_hold()


def test_a_read_sees_what_the_source_wrote_before_it(rig: Rig) -> None:
    source, target = Memory(8), Memory(8)
    region, reader = rig.open().register(source.span), rig.open()
    for value in (1, 2):
        source.data[:] = value
        assert Started(reader, piece(region), target.span).end() is None
        assert (target.data == value).all()


def test_a_channel_reads_its_own_regions(rig: Rig) -> None:
    channel, source, target = rig.open(), Memory.random(100), Memory(100)
    assert Started(channel, piece(channel.register(source.span)), target.span).end() is None
    assert np.array_equal(target.data, source.data)


def test_on_done_runs_on_another_thread(rig: Rig) -> None:
    region = rig.open().register(Memory(8).span)
    reader = rig.open()
    arrived = Started(reader, piece(region), Memory(8).span)
    assert arrived.end() is None
    cancelled = Started(reader, piece(rig.stall(region)), Memory(8).span)
    cancelled.read.cancel()
    assert isinstance(cancelled.end(), TransferFailed)
    assert threading.current_thread() not in [thread for thread, _ in arrived.calls + cancelled.calls]


def test_what_can_never_be_read_is_refused_at_once(rig: Rig) -> None:
    region, reader, local = rig.open().register(Memory(8).span), rig.open(), Memory(8)
    cuda = MemorySpan(0, 8, "cuda:0")
    for remote, span, deadline_s, problem in (
        (piece(region, 0, 7), local.span, 1.0, "7 bytes into 8"),
        (piece(region, 0, 0), local.span.slice(0, 0), 1.0, "0 bytes"),
        (piece(region, -1, 8), local.span, 1.0, "before the region"),
        (piece(replace(region, kind="pigeon")), local.span, 1.0, "kind 'pigeon'"),
        (piece(region), cuda, 1.0, "host memory"),
        (piece(region), local.span, 601.0, "deadline"),
        (piece(region), local.span, math.nan, "deadline"),
    ):
        with pytest.raises(ValueError, match=problem):
            reader.read(remote, span, deadline_s, pytest.fail)
    for span, problem in ((cuda, "host memory"), (local.span.slice(0, 0), "at least one byte")):
        with pytest.raises(ValueError, match=problem):
            reader.register(span)


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 9), (8, 1), (1, 8), (2**63 - 1, 4), (2**64, 4)])
def test_bytes_outside_of_the_region_are_refused_by_its_owner(rig: Rig, offset: int, num_bytes: int) -> None:
    region = rig.open().register(Memory(8, fill=7).span)
    target = Memory(num_bytes)
    claimed = replace(region, num_bytes=2**62)  # a reader that lies, or was lied to
    error = Started(rig.open(), piece(claimed, offset, num_bytes), target.span).end()
    assert isinstance(error, TransferFailed)
    assert not target.data.any()


@pytest.mark.parametrize(
    "change", [lambda key: bytes(16), lambda key: key[:-1], lambda key: key + b"\0", lambda key: b""]
)
def test_an_unknown_key_is_refused(rig: Rig, change) -> None:  # type: ignore[no-untyped-def]
    region, target = rig.open().register(Memory(8, fill=7).span), Memory(8)
    error = Started(rig.open(), piece(replace(region, key=change(region.key))), target.span).end()
    assert isinstance(error, TransferFailed)
    assert "unknown or stale" in str(error)
    assert not target.data.any()


def test_keys_are_never_the_same_and_say_nothing(rig: Rig) -> None:
    channel, memory = rig.open(), Memory(8)
    keys = {channel.register(memory.span).key for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {16}


def test_a_region_dies_with_its_channel_even_if_another_takes_its_place(rig: Rig) -> None:
    old = rig.open()
    region = old.register(Memory(8, fill=7).span)
    reader, target = rig.open(), Memory(8)
    assert Started(reader, piece(region), target.span).end() is None
    old.close()
    assert isinstance(Started(reader, piece(region), target.span).end(), PeerLost)
    new = rig.open(port=int(region.address.rpartition(":")[2]))
    new_region = new.register(Memory(8, fill=9).span)
    assert new_region.address == region.address
    error = Started(reader, piece(region), target.span).end()
    assert isinstance(error, TransferFailed)
    assert "unknown or stale" in str(error)
    assert (target.data == 7).all()
    assert Started(reader, piece(new_region), target.span).end() is None
    assert (target.data == 9).all()


def test_after_close_nothing_starts_and_closing_again_is_fine(rig: Rig) -> None:
    region = rig.open().register(Memory(8).span)
    closed = rig.open()
    closed.close()
    closed.close()
    rig.faults.clear()
    with pytest.raises(Draining, match="closed"):
        closed.read(piece(region), Memory(8).span, 1.0, pytest.fail)
    rig.faults.delay(EACH, 0.0)
    with pytest.raises(Draining, match="closed"):
        closed.read(piece(region), Memory(8).span, 1.0, pytest.fail)
    with pytest.raises(Draining, match="closed"):
        closed.register(Memory(8).span)
