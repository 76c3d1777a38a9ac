"""The NIXL channel with peers that die, stop, restart, or can't be reached without their help."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diptych.domain.errors import PeerError, PeerLost, TransferFailed
from diptych.domain.ports import Region
from diptych.transfer import nixl_reader, nixl_source
from diptych.transfer.nixl import NixlChannel
from diptych.v1.kv_pb2 import KvDescription
from tests.contract.channel_peer import FILL, NUM_BYTES, PeerProcess, open_peer, peer_process
from tests.contract.channel_rig import WAIT_S, Memory, Started, black_hole, kv_threads, piece, until

HUGE = 64 << 20
"""Bytes that take long enough over TCP to stop a peer in the middle."""


@pytest.fixture(params=["nixl", "nixl-tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reader(kind: str) -> Iterator[NixlChannel]:
    yield from opened(kind)


@pytest.fixture
def tcp_reader() -> Iterator[NixlChannel]:
    yield from opened("nixl-tcp")


def opened(kind: str) -> Iterator[NixlChannel]:
    channel = open_peer(kind, 0)
    assert isinstance(channel, NixlChannel)
    yield channel
    channel.close()
    assert kv_threads() == []


def stop_midway(reader: NixlChannel, peer: PeerProcess, deadline_s: float) -> tuple[Started, Memory]:
    """A read whose peer was stopped when some of its bytes had come."""
    met = Memory(8)
    assert Started(reader, piece(peer.region, 0, 8), met.span).end() is None
    target = Memory(HUGE)
    read = Started(reader, piece(peer.region), target.span, deadline_s)
    until(lambda: target.data[0] == FILL)
    peer.signal(signal.SIGSTOP)
    assert not read.read.done
    assert not target.data.all()
    return read, target


def test_a_killed_peer_is_lost_at_once_and_others_are_read_on(kind: str, reader: NixlChannel) -> None:
    with peer_process(kind=kind) as survivor, peer_process(kind=kind) as peer:
        for source in (survivor, peer):
            target = Memory(NUM_BYTES)
            assert Started(reader, piece(source.region), target.span).end() is None
            assert (target.data == FILL).all()
        killed = time.monotonic()
        peer.kill()
        target = Memory(NUM_BYTES)
        for _ in range(2):
            assert isinstance(Started(reader, piece(peer.region), target.span).end(), PeerLost)
            assert not target.data.any()
        assert time.monotonic() - killed < 10.0
        assert Started(reader, piece(survivor.region), target.span).end() is None
        assert (target.data == FILL).all()


def test_a_peer_killed_during_a_read_is_lost_at_once(tcp_reader: NixlChannel) -> None:
    with peer_process(kind="nixl-tcp", num_bytes=HUGE) as peer:
        read, target = stop_midway(tcp_reader, peer, WAIT_S)
        other = Started(tcp_reader, piece(peer.region, 0, 8), Memory(8).span)
        killed = time.monotonic()
        peer.kill()
        assert isinstance(read.end(), PeerLost)
        assert isinstance(other.end(), PeerLost)
        assert time.monotonic() - killed < 10.0
        assert target.guards_hold()


def test_a_peer_that_stops_midway_gets_no_byte_in_once_the_read_has_ended(tcp_reader: NixlChannel) -> None:
    with peer_process(kind="nixl-tcp", num_bytes=HUGE) as peer, peer_process(kind="nixl-tcp") as other:
        read, target = stop_midway(tcp_reader, peer, 1.0)
        error = read.end()
        assert isinstance(error, TransferFailed)
        assert "not complete after 1 s" in str(error)
        target.data[:] = 1  # ours again
        peer.signal(signal.SIGCONT)
        # It now sends what it owes, or is gone; either way it has heard of us when it answers or is lost.
        Started(tcp_reader, piece(peer.region, 0, 8), Memory(8).span).end()
        assert (target.data == 1).all()
        assert Started(tcp_reader, piece(other.region), Memory(NUM_BYTES).span).end() is None


def test_a_cancelled_read_that_hangs_is_cut_off_and_costs_others_one_read(
    tcp_reader: NixlChannel, caplog: pytest.LogCaptureFixture
) -> None:
    with peer_process(kind="nixl-tcp", num_bytes=HUGE) as peer, peer_process(kind="nixl-tcp") as other:
        read, target = stop_midway(tcp_reader, peer, WAIT_S)
        bystander = Started(tcp_reader, piece(peer.region, 0, 8), Memory(8).span)
        read.read.cancel()
        assert "cancelled" in str(read.end())
        assert "cut off" in str(bystander.end())
        assert target.guards_hold()
        assert Started(tcp_reader, piece(other.region), Memory(NUM_BYTES).span).end() is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_stopped_peer_is_read_on_where_its_help_is_not_needed() -> None:
    with peer_process(kind="nixl") as peer:
        for reader in opened("nixl"):
            target = Memory(NUM_BYTES)
            assert Started(reader, piece(peer.region), target.span).end() is None
            peer.signal(signal.SIGSTOP)
            target.data[:] = 0
            assert Started(reader, piece(peer.region), target.span).end() is None
            assert (target.data == FILL).all()


def test_a_peer_that_stopped_before_it_was_met_delays_nobody(
    reader: NixlChannel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its description came, the connection hangs: nothing of a caller's waits inside of UCX."""
    meet = reader._reader._agent.meet

    def stop_and_meet(name: str, metadata: bytes) -> None:
        peer.signal(signal.SIGSTOP)
        monkeypatch.setattr(reader._reader._agent, "meet", meet)
        meet(name, metadata)

    with peer_process(kind=kind) as peer, peer_process(kind=kind) as other:
        monkeypatch.setattr(reader._reader._agent, "meet", stop_and_meet)
        targets = [Memory(NUM_BYTES) for _ in range(3)]
        late = Started(reader, piece(peer.region), targets[0].span, deadline_s=0.3)
        cancelled = Started(reader, piece(peer.region), targets[1].span)
        waiting = Started(reader, piece(peer.region), targets[2].span)
        assert isinstance(late.end(), TransferFailed)
        cancelled.read.cancel()
        assert isinstance(cancelled.end(), TransferFailed)
        assert Started(reader, piece(other.region), Memory(NUM_BYTES).span).end() is None
        assert not waiting.read.done
        peer.signal(signal.SIGCONT)
        assert waiting.end() is None
        assert not targets[0].data.any()
        assert not targets[1].data.any()
        assert (targets[2].data == FILL).all()


def test_a_restarted_peer_on_the_same_port_refuses_the_old_key(kind: str, reader: NixlChannel) -> None:
    target = Memory(NUM_BYTES)
    with peer_process(kind=kind) as peer:
        stale, port = peer.region, peer.port
        assert Started(reader, piece(stale), target.span).end() is None
    with peer_process(str(port), kind) as peer:
        assert peer.region.address == stale.address
        target.data[:] = 1
        errors = [Started(reader, piece(stale), target.span).end() for _ in range(2)]
        # The first may be the one that finds the old connection broken; none gets a byte.
        assert isinstance(errors[-1], TransferFailed)
        assert "unknown or stale" in str(errors[-1])
        assert (target.data == 1).all()
        assert Started(reader, piece(peer.region), target.span).end() is None
        assert (target.data == FILL).all()


def test_nobody_at_the_address_is_a_lost_peer_and_is_not_remembered(kind: str, reader: NixlChannel) -> None:
    with peer_process(kind=kind) as peer:
        region, port = peer.region, peer.port
    for _ in range(2):
        assert isinstance(Started(reader, piece(region), Memory(NUM_BYTES).span).end(), PeerLost)
    with peer_process(str(port), kind) as peer:
        assert Started(reader, piece(peer.region), Memory(NUM_BYTES).span).end() is None


def test_a_peer_that_hangs_delays_nobody_elses_reads(reader: NixlChannel) -> None:
    source, target = Memory.random(64), Memory(64)
    region = reader.register(source.span)
    with black_hole() as address:
        hung = piece(replace(region, address=address))
        hanging = [Started(reader, hung, Memory(64).span) for _ in range(3)]
        assert Started(reader, piece(region), target.span).end() is None
        assert np.array_equal(target.data, source.data)
        assert not any(started.read.done for started in hanging)
        reader.close()
        assert all(isinstance(started.end(), TransferFailed) for started in hanging)


def test_peers_that_are_gone_are_forgotten(reader: NixlChannel, kind: str) -> None:
    for _ in range(3):
        other = open_peer(kind, 0)
        region = other.register(Memory(8).span)
        assert Started(reader, piece(region), Memory(8).span).end() is None
        other.close()
        assert isinstance(Started(reader, piece(region), Memory(8).span).end(), PeerLost)
    region = reader.register(Memory(8).span)
    assert Started(reader, piece(region), Memory(8).span).end() is None
    assert [address for address, _ in reader._reader._sources] == [region.address]


def test_a_region_that_was_not_read_for_long_is_forgotten(
    reader: NixlChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "IDLE_SOURCE_S", -1.0)
    regions = [reader.register(Memory(8, fill=7).span) for _ in range(2)]
    for region in (*regions, *regions):
        target = Memory(8)
        assert Started(reader, piece(region), target.span).end() is None
        assert (target.data == 7).all()
    assert list(reader._reader._sources) == [(regions[-1].address, regions[-1].key)]


def described_as(**changes: Any) -> Any:
    """`ask`, with some of what the owner says changed."""
    ask = nixl_source.ask

    def changed(region: Region, told: Any) -> None:
        def tell(description: KvDescription | PeerError) -> None:
            assert isinstance(description, KvDescription)
            description.MergeFrom(KvDescription(**changes))
            told(description)

        ask(region, tell)

    return changed


def test_memory_that_its_owner_would_have_to_send_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reader, "ask", described_as(place="another host"))
    for reader in opened("nixl"):
        region = reader.register(Memory(8, fill=7).span)
        error = Started(reader, piece(region), Memory(8).span).end()
        assert isinstance(error, TransferFailed)
        assert "not in one place with us" in str(error)
    for reader in opened("nixl-tcp"):
        region = reader.register(Memory(8, fill=7).span)
        assert Started(reader, piece(region), Memory(8).span).end() is None


@pytest.mark.parametrize(
    "changes", [{"metadata": b"\xff" * 300}, {"metadata": b"nixlSerDes|"}, {"agent": "somebody else"}]
)
def test_a_description_that_is_none_fails_the_read_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    for reader in opened("nixl"):
        region = reader.register(Memory(8, fill=7).span)
        with monkeypatch.context() as patch:
            patch.setattr(nixl_reader, "ask", described_as(**changes))
            assert isinstance(Started(reader, piece(region), Memory(8).span).end(), TransferFailed)
        assert Started(reader, piece(region), Memory(8).span).end() is None


def num_open() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_closed_channels_leave_no_thread_and_no_file() -> None:
    def use() -> None:
        for reader in opened("nixl"):
            region = reader.register(Memory(8, fill=7).span)
            assert Started(reader, piece(region), Memory(8).span).end() is None

    use()  # what gRPC and the libraries open once stays
    before = num_open()
    for _ in range(3):
        use()
    until(lambda: num_open() <= before)
