"""Failures on demand: each kind on the read it names, and no other."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from diptych.domain.errors import PeerLost, TransferFailed
from diptych.domain.ports import KvChannel, Region
from diptych.transfer.faults import EACH, Faults
from diptych.transfer.memory import MemoryFabric
from tests.contract.channel_rig import WAIT_S, Memory, Started, kv_threads, piece, until


class House:
    def __init__(self) -> None:
        self.faults = Faults()
        fabric = MemoryFabric()
        self.owner: KvChannel = fabric.open()
        self.reader: KvChannel = fabric.open(faults=self.faults)
        self.source = Memory.random(1000)
        self.region: Region = self.owner.register(self.source.span)

    def read(self, deadline_s: float = WAIT_S) -> tuple[Started, Memory]:
        target = Memory(1000)
        return Started(self.reader, piece(self.region), target.span, deadline_s), target

    def arrived(self, target: Memory) -> bool:
        return target.guards_hold() and np.array_equal(target.data, self.source.data)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.reader.close()
    house.owner.close()
    assert kv_threads() == []
    assert house.faults._held == {}


def test_fail_fails_the_read_it_names(house: House) -> None:
    house.faults.fail(2)
    reads = [house.read() for _ in range(3)]
    errors = [read.end() for read, _ in reads]
    assert [type(error) for error in errors] == [type(None), TransferFailed, type(None)]
    assert [house.arrived(target) for _, target in reads] == [True, False, True]
    assert not reads[1][1].data.any()
    assert house.faults.num_reads == 3


def test_corrupt_flips_one_bit_and_says_nothing(house: House) -> None:
    house.faults.corrupt(2)
    reads = [house.read() for _ in range(3)]
    assert [read.end() for read, _ in reads] == [None] * 3
    assert house.arrived(reads[0][1])
    assert house.arrived(reads[2][1])
    wrong = reads[1][1].data ^ house.source.data
    assert np.unpackbits(wrong).sum() == 1


def test_a_held_read_waits_for_its_release(house: House) -> None:
    house.faults.hold(1)
    held, held_target = house.read()
    other, other_target = house.read()
    assert other.end() is None
    assert house.arrived(other_target)
    assert not held.read.done
    house.source.data[:] = 3  # read when it is released, not when it was asked for
    house.faults.release(1)
    assert held.end() is None
    assert (held_target.data == 3).all()


def test_release_lets_all_held_reads_go(house: House) -> None:
    house.faults.hold(EACH)
    reads = [house.read() for _ in range(4)]
    assert not any(read.read.done for read, _ in reads)
    house.faults.clear()
    house.faults.release()
    assert [read.end() for read, _ in reads] == [None] * 4
    assert all(house.arrived(target) for _, target in reads)


def test_a_held_read_hears_cancel_and_deadline_and_can_not_be_released_afterwards(house: House) -> None:
    house.faults.hold(EACH)
    cancelled, cancelled_target = house.read()
    late, late_target = house.read(deadline_s=0.05)
    cancelled.read.cancel()
    assert "cancelled" in str(cancelled.end())
    assert "not complete" in str(late.end())
    house.faults.release()
    assert not cancelled_target.data.any()
    assert not late_target.data.any()


def test_a_dropped_read_ends_at_its_deadline(house: House) -> None:
    house.faults.drop(1)
    begun = time.monotonic()
    read, target = house.read(deadline_s=0.2)
    assert isinstance(read.end(), TransferFailed)
    assert time.monotonic() - begun >= 0.2
    assert not target.data.any()


def test_a_delayed_read_comes_late(house: House) -> None:
    house.faults.delay(1, 0.2)
    begun = time.monotonic()
    read, target = house.read()
    assert read.end() is None
    assert time.monotonic() - begun >= 0.2
    assert house.arrived(target)


def test_a_read_that_is_late_reaches_a_peer_that_has_closed(house: House) -> None:
    house.faults.hold(1)
    read, target = house.read()
    house.owner.close()
    house.faults.release()
    assert isinstance(read.end(), PeerLost)
    assert not target.data.any()


def test_an_error_of_the_inner_channel_is_not_called_corruption(house: House) -> None:
    house.faults.corrupt(1)
    house.owner.close()
    read, target = house.read()
    assert isinstance(read.end(), PeerLost)
    assert not target.data.any()


def test_a_close_while_reads_are_released_ends_each_once(house: House) -> None:
    house.faults.hold(EACH)
    reads = [house.read() for _ in range(50)]
    releasing = threading.Thread(target=house.faults.release)
    releasing.start()
    house.reader.close()
    releasing.join(WAIT_S)
    until(lambda: all(read.read.done for read, _ in reads))
    for read, target in reads:
        error = read.end()
        assert house.arrived(target) if error is None else isinstance(error, TransferFailed)
