"""Parts of a read: their wire form is protobuf's, and they land where they belong or not at all."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from diptych.domain.errors import TransferFailed
from diptych.domain.ports import MemorySpan
from diptych.transfer.landing import Landing
from diptych.transfer.parts import decode_part, encode_part
from diptych.v1.kv_pb2 import KvReadPart
from tests.contract.channel_rig import GUARD, Memory

offsets = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 127, 128, 1 << 20, 2**63, 2**64 - 1]))


@given(offset=offsets, data=st.binary(min_size=1, max_size=400))
def test_the_bytes_are_protobufs(offset: int, data: bytes) -> None:
    ours = encode_part(offset, memoryview(data))
    assert ours == KvReadPart(offset=offset, data=data).SerializeToString(deterministic=True)
    assert decode_part(ours) == (offset, data)


@given(offset=offsets, data=st.binary(max_size=400), unknown=st.binary(max_size=20))
def test_other_spellings_mean_the_same(offset: int, data: bytes, unknown: bytes) -> None:
    head = KvReadPart(offset=offset).SerializeToString()
    body = KvReadPart(data=data).SerializeToString()
    field_9 = b"\x4a" + bytes([len(unknown)]) + unknown
    for message in (body + head, head + body + field_9, field_9 + head + body, head + head + body):
        assert decode_part(message) == (offset, data)


@given(st.binary(max_size=60))
@example(b"")
@example(b"\x08")
@example(b"\x08" + b"\xff" * 20)
@example(b"\x12\xff\xff\xff\xff\x0f")
@example(b"\x12\x05abc")
@example(b"\x08" + b"\xff" * 9 + b"\x7f\x12\x01a")
@example(b"\x12\x81\x80\x80\x80\x80\x80\x80\x00a")
def test_any_bytes_are_read_as_protobuf_reads_them_or_refused(message: bytes) -> None:
    try:
        expected = KvReadPart.FromString(message)
    except DecodeError:
        with pytest.raises(TransferFailed, match="not a part"):
            decode_part(message)
    else:
        assert decode_part(message) == (expected.offset, expected.data)


parts = st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 12)), max_size=6)


@given(num_bytes=st.integers(1, 10), parts=parts)
@example(num_bytes=10, parts=[(0, 4), (4, 6)])
def test_parts_land_in_order_inside_of_the_span_or_change_nothing(
    num_bytes: int, parts: list[tuple[int, int]]
) -> None:
    memory, expected = Memory(num_bytes), bytearray(num_bytes)
    landing, landed = Landing(memory.span), 0
    for number, (offset, size) in enumerate(parts, start=1):
        data = memoryview(bytes([number]) * size)
        if offset == landed and 0 < size <= num_bytes - landed:
            landing.put(offset, data)
            expected[offset : offset + size] = data
            landed += size
        else:
            with pytest.raises(TransferFailed):
                landing.put(offset, data)
        assert memory.data.tobytes() == expected
        assert memory.guards_hold()
    if landed == num_bytes:
        landing.check_complete()
    else:
        with pytest.raises(TransferFailed, match=f"only {landed} of {num_bytes}"):
            landing.check_complete()


def test_the_guards_of_these_tests_notice_a_stray_write() -> None:
    memory = Memory(8)
    memory._all[-1] = GUARD ^ 1
    assert not memory.guards_hold()


def test_only_host_memory_takes_parts() -> None:
    with pytest.raises(ValueError, match="no host view"):
        Landing(MemorySpan(0, 8, "cuda:0"))
