"""The port that the gRPC channel opens: what strangers, broken clients and slow readers can do to it."""

import os
import random
import socket
import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from diptych.domain.errors import InvalidField, PeerLost
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.ports import Region
from diptych.transfer import grpc_peer
from diptych.transfer.grpc import GrpcChannel
from diptych.transfer.grpc_wire import CLIENT_OPTIONS, PART_BYTES, READ_METHOD
from diptych.transfer.open import open_channel
from diptych.v1.kv_pb2 import KvReadPart, KvReadRequest
from diptych.v1.kv_pb2_grpc import KvTransferStub
from tests.contract.channel_rig import WAIT_S, Memory, Started, black_hole, kv_threads, make_tls, piece

MIB = 1 << 20


@pytest.fixture
def owner() -> Iterator[GrpcChannel]:
    channel = GrpcChannel("127.0.0.1", 0)
    yield channel
    channel.close()
    assert kv_threads() == []


def still_serves(owner: GrpcChannel) -> bool:
    source, target = Memory.random(1000), Memory(1000)
    reader = GrpcChannel("127.0.0.1", 0)
    error = Started(reader, piece(owner.register(source.span)), target.span).end()
    reader.close()
    return error is None and np.array_equal(source.data, target.data)


def request_for(region: Region, **changes: object) -> KvReadRequest:
    request = KvReadRequest(wire_version=WIRE_VERSION, region_key=region.key, num_bytes=region.num_bytes)
    request.MergeFrom(KvReadRequest(**changes))  # type: ignore[arg-type]
    return request


def refusal(
    owner: GrpcChannel, message: bytes, timeout: float | None = WAIT_S
) -> tuple[grpc.StatusCode, str]:
    """Sends raw bytes as a read; the status that comes back."""
    with grpc.insecure_channel(owner.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(READ_METHOD)(message, timeout=timeout))
    return caught.value.code(), caught.value.details()


def test_generated_code_reads_what_we_serve(owner: GrpcChannel) -> None:
    source = Memory.random(2 * MIB + 5)
    region = owner.register(source.span)
    with grpc.insecure_channel(owner.address) as channel:
        parts = list(KvTransferStub(channel).Read(request_for(region), timeout=WAIT_S))
    assert all(isinstance(part, KvReadPart) for part in parts)
    assert [(part.offset, len(part.data)) for part in parts] == [(0, MIB), (MIB, MIB), (2 * MIB, 5)]
    assert b"".join(part.data for part in parts) == source.data.tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_on_the_port_change_nothing(owner: GrpcChannel, seed: int) -> None:
    host, _, port = owner.address.rpartition(":")
    noise = random.Random(seed).randbytes(100_000)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if seed % 2 else b""
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        try:
            connection.sendall(preface + noise)
            while connection.recv(4096):
                pass
        except (ConnectionError, BrokenPipeError):
            pass  # hung up on: as it should be
    assert still_serves(owner)


def test_a_request_that_is_none_is_refused(owner: GrpcChannel) -> None:
    code, details = refusal(owner, b"\xff" * 40)
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "this is not a KvReadRequest")
    assert still_serves(owner)


def test_a_huge_request_is_refused_before_it_is_read(owner: GrpcChannel) -> None:
    region = owner.register(Memory(8).span)
    message = request_for(region, region_key=bytes(100_000)).SerializeToString()
    assert refusal(owner, message)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert still_serves(owner)


@pytest.mark.parametrize("num_bytes", [2**40, 2**63, 2**64 - 1])
def test_an_oversize_length_is_refused_without_allocating_it(owner: GrpcChannel, num_bytes: int) -> None:
    region = owner.register(Memory(8).span)
    for message in (request_for(region, num_bytes=num_bytes), request_for(region, offset=num_bytes)):
        code, details = refusal(owner, message.SerializeToString())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "outside of the region's 8 bytes" in details
    assert still_serves(owner)


def test_a_read_needs_a_key_a_version_and_a_deadline(owner: GrpcChannel) -> None:
    region = owner.register(Memory(8).span)
    good = request_for(region)
    no_key, no_version, nothing = KvReadRequest(), KvReadRequest(), KvReadRequest()
    for message in (no_key, no_version, nothing):
        message.CopyFrom(good)
    no_key.ClearField("region_key")
    no_version.ClearField("wire_version")
    nothing.ClearField("num_bytes")
    assert refusal(owner, no_key.SerializeToString())[0] is grpc.StatusCode.NOT_FOUND
    assert refusal(owner, no_version.SerializeToString())[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert refusal(owner, nothing.SerializeToString())[0] is grpc.StatusCode.INVALID_ARGUMENT
    for timeout in (None, 3600.0):
        code, details = refusal(owner, good.SerializeToString(), timeout)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "deadline" in details


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_readers_that_do_not_read_cost_little_and_do_not_hold_up_close(owner: GrpcChannel) -> None:
    region = owner.register(Memory.random(64 * MIB).span)
    with grpc.insecure_channel(
        owner.address, [("grpc.max_receive_message_length", 2 * PART_BYTES)]
    ) as channel:
        before = resident_bytes()
        calls = [KvTransferStub(channel).Read(request_for(region), timeout=WAIT_S) for _ in range(6)]
        assert [len(next(call).data) for call in calls] == [PART_BYTES] * 6
        owner.close()
        assert resident_bytes() - before < 100 * MIB, "six reads of 64 MiB were buffered"
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)


@pytest.mark.slow
def test_a_silent_read_survives_its_own_keepalive(
    owner: GrpcChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pings without data than a server forgives by default; ours forgives them."""
    often = [option for option in CLIENT_OPTIONS if option[0] != "grpc.keepalive_time_ms"]
    monkeypatch.setattr(grpc_peer, "CLIENT_OPTIONS", [*often, ("grpc.keepalive_time_ms", 1050)])
    reader, ended = GrpcChannel("127.0.0.1", 0), threading.Event()
    region = owner.register(Memory(8).span)
    with owner._regions._lock:  # the owner hears the read and cannot answer it
        read = reader.read(piece(region), Memory(8).span, WAIT_S, ended.set)
        assert not ended.wait(6.0)
    assert ended.wait(WAIT_S)
    assert read.error is None
    reader.close()


def test_regions_are_closed_before_their_memory_may_be_freed(owner: GrpcChannel) -> None:
    region = owner.register(Memory(8).span)
    closing = threading.Thread(target=owner.close)
    with owner._regions.borrow(region.key, 0, 8):
        closing.start()
        closing.join(0.2)
        assert closing.is_alive(), "close returned while bytes were being read"
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_port_that_is_taken_is_named(owner: GrpcChannel) -> None:
    port = int(owner.address.rpartition(":")[2])
    with pytest.raises(InvalidField, match=f"127.0.0.1:{port}.*taken"):
        GrpcChannel("127.0.0.1", port)
    with black_hole() as address, pytest.raises(InvalidField, match=f"{address}.*taken"):
        GrpcChannel("127.0.0.1", int(address.rpartition(":")[2]))
    assert still_serves(owner)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
def test_a_wildcard_needs_an_address_to_advertise(host: str) -> None:
    with pytest.raises(InvalidField, match="advertise"):
        open_channel("grpc", host, 0)


def test_a_wildcard_serves_at_the_advertised_address() -> None:
    channel = open_channel("grpc", "0.0.0.0", 0, advertise_host="127.0.0.1")
    target = Memory(8)
    region = channel.register(Memory(8, fill=7).span)
    assert region.address.startswith("127.0.0.1:")
    assert Started(channel, piece(region), target.span).end() is None
    assert (target.data == 7).all()
    channel.close()


def test_a_plain_client_gets_nothing_from_a_tls_port() -> None:
    owner = open_channel("grpc", "127.0.0.1", 0, tls=make_tls())
    plain = open_channel("grpc", "127.0.0.1", 0)
    region = owner.register(Memory(8).span)
    assert isinstance(Started(plain, piece(region), Memory(8).span).end(), PeerLost)
    owner.close()
    plain.close()
