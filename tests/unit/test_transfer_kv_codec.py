"""Regions and pieces over the wire: what goes in comes out, and what is out of bounds is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.domain.errors import InvalidField
from diptych.domain.ports import Region, RemotePiece
from diptych.rpc.kv_codec import (
    MAX_ADDRESS_CHARS,
    MAX_KEY_BYTES,
    MAX_KIND_CHARS,
    MAX_METADATA_BYTES,
    MAX_REGION_BYTES,
    piece_from_proto,
    piece_to_proto,
    region_from_proto,
    region_to_proto,
)
from diptych.v1.kv_pb2 import KvPiece, KvRegion

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=32)


@st.composite
def pieces(draw: st.DrawFn) -> RemotePiece:
    size = draw(st.integers(1, MAX_REGION_BYTES))
    num_bytes = draw(st.integers(1, size))
    region = Region(
        draw(text), draw(text), draw(st.binary(min_size=1, max_size=MAX_KEY_BYTES)), size,
        draw(st.integers(0, 2**64 - 1)), draw(st.binary(max_size=100)),
    )  # fmt: skip
    return RemotePiece(region, draw(st.integers(0, size - num_bytes)), num_bytes)


@given(pieces())
def test_a_piece_survives_the_wire(piece: RemotePiece) -> None:
    assert piece_from_proto(KvPiece.FromString(piece_to_proto(piece).SerializeToString())) == piece
    message = region_to_proto(piece.region)
    assert region_from_proto(KvRegion.FromString(message.SerializeToString())) == piece.region


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", ""),
        ("kind", "k" * (MAX_KIND_CHARS + 1)),
        ("address", ""),
        ("address", "a" * (MAX_ADDRESS_CHARS + 1)),
        ("key", b""),
        ("key", bytes(MAX_KEY_BYTES + 1)),
        ("num_bytes", 0),
        ("num_bytes", MAX_REGION_BYTES + 1),
        ("metadata", bytes(MAX_METADATA_BYTES + 1)),
    ],
)
def test_a_region_out_of_bounds_is_refused_by_field(field: str, value: object) -> None:
    message = KvRegion(kind="grpc", address="host:1", key=bytes(16), num_bytes=100)
    setattr(message, field, value)
    with pytest.raises(InvalidField, match=f"^begin.region.{field}: must be"):
        piece_from_proto(KvPiece(region=message, num_bytes=1), "begin")


@pytest.mark.parametrize(
    ("offset", "num_bytes", "field"),
    [(0, 0, "num_bytes"), (0, 101, "num_bytes"), (1, 100, "offset"), (100, 1, "offset"),
     (2**64 - 1, 1, "offset"), (0, 2**64 - 1, "num_bytes"), (2**63, 2**63, "num_bytes")],
)  # fmt: skip
def test_a_piece_outside_of_its_region_is_refused_by_field(offset: int, num_bytes: int, field: str) -> None:
    region = KvRegion(kind="grpc", address="host:1", key=bytes(16), num_bytes=100)
    with pytest.raises(InvalidField, match=f"^piece.{field}: must be"):
        piece_from_proto(KvPiece(region=region, offset=offset, num_bytes=num_bytes))
