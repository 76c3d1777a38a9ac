"""The gRPC channel with peers that die, stop, restart, lie, or do not speak its language."""

import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import numpy as np
import pytest

from diptych.domain.errors import LayoutMismatch, PeerLost, TransferFailed
from diptych.transfer import grpc as grpc_module
from diptych.transfer import grpc_peer
from diptych.transfer.grpc import GrpcChannel
from diptych.v1.kv_pb2 import KvReadPart, KvReadRequest
from tests.contract.channel_peer import FILL, NUM_BYTES, Reply, peer_process, peer_that
from tests.contract.channel_rig import WAIT_S, Memory, Started, black_hole, kv_threads, make_tls, piece, until


@pytest.fixture
def reader() -> Iterator[GrpcChannel]:
    channel = GrpcChannel("127.0.0.1", 0)
    yield channel
    channel.close()
    assert kv_threads() == []


def test_a_peer_killed_during_a_read_is_lost_at_once(reader: GrpcChannel) -> None:
    with peer_process("stuck") as peer:
        target = Memory(NUM_BYTES)
        read = Started(reader, piece(peer.region), target.span)
        waiting = [Started(reader, piece(peer.region), Memory(NUM_BYTES).span) for _ in range(4)]
        until(lambda: target.data[1023] == FILL)
        assert not read.read.done
        killed = time.monotonic()
        peer.kill()
        assert isinstance(read.end(), PeerLost)
        assert all(isinstance(other.end(), PeerLost) for other in waiting)
        assert time.monotonic() - killed < 5.0
        assert target.guards_hold()
        assert not target.data[1024:].any()


@pytest.mark.slow
def test_a_stopped_peer_is_lost_long_before_the_deadline(reader: GrpcChannel) -> None:
    with peer_process("stuck") as peer:
        target = Memory(NUM_BYTES)
        read = Started(reader, piece(peer.region), target.span, deadline_s=600.0)
        until(lambda: target.data[1023] == FILL)
        peer.signal(signal.SIGSTOP)
        assert isinstance(read.end(), PeerLost)


def test_nothing_arrives_after_a_read_was_cancelled_midway(reader: GrpcChannel) -> None:
    with peer_process("stuck") as peer:
        target = Memory(NUM_BYTES)
        read = Started(reader, piece(peer.region), target.span)
        until(lambda: target.data[1023] == FILL)
        read.read.cancel()
        assert isinstance(read.end(), TransferFailed)
        target.data[:] = 1  # ours again
        peer.kill()
        reader.close()
        assert (target.data == 1).all()


def test_a_restarted_peer_on_the_same_port_refuses_the_old_key(reader: GrpcChannel) -> None:
    target = Memory(NUM_BYTES)
    with peer_process("0") as peer:
        stale = peer.region
        assert Started(reader, piece(stale), target.span).end() is None
        port = peer.port
    with peer_process(str(port)) as peer:
        assert peer.region.address == stale.address
        target.data[:] = 1
        errors = [Started(reader, piece(stale), target.span).end() for _ in range(2)]
        # The first may be the one that finds the old connection broken; none gets a byte.
        assert isinstance(errors[-1], TransferFailed)
        assert "unknown or stale" in str(errors[-1])
        assert (target.data == 1).all()
        assert Started(reader, piece(peer.region), target.span).end() is None
        assert (target.data == FILL).all()


def test_nobody_at_the_address_is_a_lost_peer_and_is_not_remembered(reader: GrpcChannel) -> None:
    with peer_process("0") as peer:
        region = peer.region
        port = peer.port
    for _ in range(3):
        assert isinstance(Started(reader, piece(region), Memory(NUM_BYTES).span).end(), PeerLost)
    with peer_process(str(port)) as peer:  # reachable at once: no back-off is left
        assert Started(reader, piece(peer.region), Memory(NUM_BYTES).span).end() is None


def test_a_peer_that_hangs_delays_nobody_elses_reads(reader: GrpcChannel) -> None:
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


def test_threads_that_leave_at_any_moment_lose_no_read(
    reader: GrpcChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_peer, "LINGER_S", 0.0)
    region = reader.register(Memory(8, fill=7).span)
    for _ in range(100):
        reads = [Started(reader, piece(region), Memory(8).span) for _ in range(3)]
        assert [read.end() for read in reads] == [None] * 3
    until(lambda: not any(name.startswith("kv-read-") for name in kv_threads()))


def test_a_peer_that_nothing_was_read_from_for_long_is_hung_up_on(
    reader: GrpcChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_module, "IDLE_PEER_S", -1.0)
    one, two = GrpcChannel("127.0.0.1", 0), GrpcChannel("127.0.0.1", 0)
    regions = [channel.register(Memory(8, fill=7).span) for channel in (one, two)]
    for region in (*regions, *regions):
        target = Memory(8)
        assert Started(reader, piece(region), target.span).end() is None
        assert (target.data == 7).all()
        until(lambda: reader._peers[region.address].idle_s(time.monotonic()) > 0)  # noqa: B023
    assert list(reader._peers) == [regions[-1].address]
    one.close()
    two.close()


def parts(*pieces: tuple[int, int]) -> Reply:
    """Answers with parts of (offset, length)."""

    def reply(_: KvReadRequest, __: grpc.ServicerContext) -> Iterator[KvReadPart]:
        for offset, size in pieces:
            yield KvReadPart(offset=offset, data=bytes([FILL]) * size)

    return reply


@pytest.mark.parametrize(
    ("reply", "landed", "problem"),
    [
        (parts(), 0, "only 0 of 100"),
        (parts((0, 99)), 99, "only 99 of 100"),
        (parts((0, 101)), 0, "101 bytes came at 0"),
        (parts((0, 60), (60, 41)), 60, "41 bytes came at 60"),
        (parts((0, 100), (100, 1)), 100, "1 bytes came at 100"),
        (parts((50, 50), (0, 50)), 0, "came at 50, 0 was next"),
        (parts((0, 60), (50, 50)), 60, "came at 50, 60 was next"),
        (parts((0, 60), (0, 40)), 60, "came at 0, 60 was next"),
        (parts((0, 60), (2**64 - 1, 1)), 60, "60 was next"),
        (parts((0, 60), (60, 0), (60, 40)), 60, "0 bytes came at 60"),
        (parts((0, 2 << 20)), 0, "arger than max"),
    ],
)
def test_parts_that_do_not_fit_fail_the_read(
    reader: GrpcChannel, reply: Reply, landed: int, problem: str
) -> None:
    target = Memory(100)
    with peer_that(reply) as region:
        error = Started(reader, piece(region, 0, 100), target.span).end()
    assert isinstance(error, TransferFailed)
    assert problem in str(error)
    assert target.guards_hold()
    assert (target.data[:landed] == FILL).all()
    assert not target.data[landed:].any()


def test_our_parts_may_be_of_any_size_below_the_bound(reader: GrpcChannel) -> None:
    target = Memory(100)
    with peer_that(parts((0, 1), (1, 98), (99, 1))) as region:
        assert Started(reader, piece(region, 0, 100), target.span).end() is None
    assert (target.data == FILL).all()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, PeerLost),
        (grpc.StatusCode.FAILED_PRECONDITION, LayoutMismatch),
        (grpc.StatusCode.NOT_FOUND, TransferFailed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TransferFailed),
        (grpc.StatusCode.INTERNAL, TransferFailed),
    ],
)
def test_a_status_becomes_the_domains_error(
    reader: GrpcChannel, code: grpc.StatusCode, error: type[Exception]
) -> None:
    def abort(_: KvReadRequest, context: grpc.ServicerContext) -> Iterator[KvReadPart]:
        context.abort(code, "the reason")

    with peer_that(abort) as region:
        failure = Started(reader, piece(region), Memory(NUM_BYTES).span).end()
    assert type(failure) is error
    assert f"{region.address}: the reason" in str(failure)


def test_another_wire_version_is_a_layout_mismatch(
    reader: GrpcChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_peer, "WIRE_VERSION", 99)
    error = Started(reader, piece(reader.register(Memory(8).span)), Memory(8).span).end()
    assert isinstance(error, LayoutMismatch)
    assert "wire version 99 was asked for" in str(error)


@pytest.mark.parametrize(("server_tls", "reader_tls"), [(True, True), (True, False), (False, True)])
def test_whoever_is_not_of_our_authority_reads_nothing(server_tls: bool, reader_tls: bool) -> None:
    owner = GrpcChannel("127.0.0.1", 0, tls=make_tls() if server_tls else None)
    stranger = GrpcChannel("127.0.0.1", 0, tls=make_tls() if reader_tls else None)
    target = Memory(8)
    region = owner.register(Memory(8, fill=7).span)
    assert isinstance(Started(stranger, piece(region), target.span, WAIT_S).end(), PeerLost)
    assert not target.data.any()
    owner.close()
    stranger.close()


def test_peers_that_are_gone_are_forgotten(reader: GrpcChannel) -> None:
    for _ in range(5):
        other = GrpcChannel("127.0.0.1", 0)
        region = other.register(Memory(8).span)
        assert Started(reader, piece(region), Memory(8).span).end() is None
        other.close()
        assert isinstance(Started(reader, piece(region), Memory(8).span).end(), PeerLost)
    region = reader.register(Memory(8).span)
    assert Started(reader, piece(region), Memory(8).span).end() is None
    assert list(reader._peers) == [region.address]
    assert reader._retired == []
