"""Every read ends exactly once, in time, whoever wants its end."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from diptych.domain.errors import TransferFailed
from tests.contract.channel_rig import RIGS, WAIT_S, Memory, Rig, Started, kv_threads, piece


@pytest.fixture(params=list(RIGS))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = RIGS[request.param]()
    yield rig
    rig.close()
    assert kv_threads() == [], "a closed channel left threads"


def stalled(rig: Rig, num_reads: int, deadline_s: float) -> tuple[list[Started], list[Memory]]:
    """More reads from one peer than a channel has threads for it; none will ever arrive."""
    region = rig.stall(rig.open().register(Memory(8, fill=7).span))
    reader = rig.open()
    targets = [Memory(8) for _ in range(num_reads)]
    return [Started(reader, piece(region), target.span, deadline_s) for target in targets], targets


def untouched(targets: list[Memory]) -> bool:
    return all(target.guards_hold() and not target.data.any() for target in targets)


def test_a_deadline_ends_running_and_waiting_reads_alike(rig: Rig) -> None:
    begun = time.monotonic()
    reads, targets = stalled(rig, 5, deadline_s=0.3)
    for read in reads:
        error = read.end()
        assert isinstance(error, TransferFailed)
        assert "not complete after" in str(error)
    assert time.monotonic() - begun < 3.0, "each read waited for the one before"
    assert untouched(targets)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0])
def test_a_deadline_that_is_over_ends_the_read(rig: Rig, deadline_s: float) -> None:
    (read,), targets = stalled(rig, 1, deadline_s)
    assert isinstance(read.end(), TransferFailed)
    assert untouched(targets)


def test_cancel_ends_running_and_waiting_reads_alike(rig: Rig) -> None:
    reads, targets = stalled(rig, 5, deadline_s=WAIT_S)
    for started in reversed(reads):
        assert not started.read.done
        assert started.read.error is None
        started.read.cancel()
        started.read.cancel()
        error = started.end()
        assert isinstance(error, TransferFailed)
        assert "cancelled" in str(error)
    assert untouched(targets)


def test_cancel_of_one_read_leaves_the_others_alone(rig: Rig) -> None:
    source = Memory.random(1 << 20)
    region, reader = rig.open().register(source.span), rig.open()
    targets = [Memory(1 << 20) for _ in range(8)]
    reads = [Started(reader, piece(region), target.span) for target in targets]
    for started in reads[::2]:
        started.read.cancel()
    for i, (started, target) in enumerate(zip(reads, targets, strict=True)):
        error = started.end()
        assert error is None or (i % 2 == 0 and "cancelled" in str(error))
        assert error is not None or np.array_equal(target.data, source.data)
        started.read.cancel()
        assert started.read.error is error, "a read that has ended can't be cancelled any more"


def test_close_ends_running_and_waiting_reads_before_it_returns(rig: Rig) -> None:
    region = rig.stall(rig.open().register(Memory(8, fill=7).span))
    reader = rig.open()
    targets = [Memory(8) for _ in range(5)]
    reads = [Started(reader, piece(region), target.span) for target in targets]
    reader.close()
    assert [started.read.done for started in reads] == [True] * 5
    for started in reads:
        error = started.end()
        assert isinstance(error, TransferFailed)
        assert "closed" in str(error)
    assert untouched(targets)


def test_a_failing_on_done_ends_no_other_read(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    region, reader = rig.open().register(Memory(8, fill=7).span), rig.open()

    def explode() -> None:
        raise RuntimeError("on purpose")

    for _ in range(3):
        reader.read(piece(region), Memory(8).span, WAIT_S, explode)
    target = Memory(8)
    assert Started(reader, piece(region), target.span).end() is None
    reader.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
