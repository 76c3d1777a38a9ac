"""Length-prefixed MessagePack frames between a worker's two processes.

    frame = length (4 bytes, little-endian) + MessagePack of one inbox or outbox

The pair of sockets is inherited by the child and never listens anywhere; frames are typed and bounded all
the same.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 20
HEADER = struct.Struct("<I")


class FrameCodec(Generic[T]):
    """Turns values of one type into frames and back."""

    def __init__(self, message_type: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: object) -> bytes:
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
        return HEADER.pack(len(body)) + body

    def decode(self, body: bytes | memoryview) -> T:
        """Raises msgspec.ValidationError on anything but the expected type."""
        return self._decoder.decode(body)


def frame_length(header: bytes | memoryview) -> int:
    """Length of the body that follows `header`. Raises ValueError when it is over the limit."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return int(length)
