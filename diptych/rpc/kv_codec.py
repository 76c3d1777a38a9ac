"""Descriptions of remote memory, between domain and protobuf: `Region` and `RemotePiece`.

What a peer sends is checked before it becomes a domain type: sizes are bounded, and a piece lies inside its
region. The bytes themselves travel through a KV channel, never through here.
"""

from __future__ import annotations

from diptych.domain.errors import InvalidField
from diptych.domain.ports import Region, RemotePiece
from diptych.v1.kv_pb2 import KvPiece, KvRegion

MAX_KIND_CHARS = 32
MAX_ADDRESS_CHARS = 256
MAX_KEY_BYTES = 64
MAX_METADATA_BYTES = 64 * 1024
MAX_REGION_BYTES = 1 << 48


def region_to_proto(region: Region) -> KvRegion:
    """The message that describes `region`."""
    return KvRegion(
        kind=region.kind,
        address=region.address,
        key=region.key,
        num_bytes=region.num_bytes,
        base=region.base,
        metadata=region.metadata,
    )


def region_from_proto(message: KvRegion, field: str = "region") -> Region:
    """The region that `message` describes. Raises InvalidField, naming what in `field` is out of bounds."""
    _sized(f"{field}.kind", len(message.kind), 1, MAX_KIND_CHARS, "characters")
    _sized(f"{field}.address", len(message.address), 1, MAX_ADDRESS_CHARS, "characters")
    _sized(f"{field}.key", len(message.key), 1, MAX_KEY_BYTES, "bytes")
    _sized(f"{field}.num_bytes", message.num_bytes, 1, MAX_REGION_BYTES, "bytes")
    _sized(f"{field}.metadata", len(message.metadata), 0, MAX_METADATA_BYTES, "bytes")
    return Region(
        message.kind, message.address, message.key, message.num_bytes, message.base, message.metadata
    )


def piece_to_proto(piece: RemotePiece) -> KvPiece:
    """The message that describes `piece`."""
    return KvPiece(region=region_to_proto(piece.region), offset=piece.offset, num_bytes=piece.num_bytes)


def piece_from_proto(message: KvPiece, field: str = "piece") -> RemotePiece:
    """The piece that `message` describes. Raises InvalidField, also when it is not all inside its region."""
    region = region_from_proto(message.region, f"{field}.region")
    _sized(f"{field}.num_bytes", message.num_bytes, 1, region.num_bytes, "bytes")
    _sized(f"{field}.offset", message.offset, 0, region.num_bytes - message.num_bytes, "bytes")
    return RemotePiece(region, message.offset, message.num_bytes)


def _sized(field: str, size: int, low: int, high: int, unit: str) -> None:
    if not low <= size <= high:
        raise InvalidField(field, f"must be {low} to {high} {unit}, is {size}")
