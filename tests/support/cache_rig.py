"""Who talks to a cache in tests: a worker that offers chunks out of its memory and reads what it borrows."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

import numpy as np
import xxhash

from diptych.domain.errors import PeerError
from diptych.domain.ids import ChunkHash
from diptych.domain.ports import KvChannel, MemorySpan, Region, RemotePiece
from services.cache.arena import ALIGN
from services.cache.loop import read

FINGERPRINT = "0123456789abcdef" * 2
OTHER_FINGERPRINT = "f" * 32
NUM_TOKENS = 256
WAIT_S = 30.0
"""Generous: what needs so long has failed."""


def digest_of(data: bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()


@dataclass(frozen=True, slots=True)
class Offering:
    """A chunk as its worker would offer it."""

    name: ChunkHash
    piece: RemotePiece
    digest: bytes
    data: bytes


class Worker:
    """Holds `num_chunks` chunks of random bytes, and reads from others."""

    def __init__(
        self, channel: KvChannel, num_chunks: int = 8, chunk_bytes: int = ALIGN, seed: int = 0
    ) -> None:
        self.channel = channel
        self._memory = np.random.default_rng(seed).integers(0, 256, (num_chunks, chunk_bytes), dtype=np.uint8)
        self._chunk_bytes = chunk_bytes
        span = MemorySpan(self._memory.ctypes.data, self._memory.nbytes, owner=self._memory)
        self.region: Region = channel.register(span)

    def chunk(self, index: int) -> Offering:
        data = self._memory[index].tobytes()
        name = ChunkHash(hashlib.blake2b(data, digest_size=16).digest())
        piece = RemotePiece(self.region, index * self._chunk_bytes, self._chunk_bytes)
        return Offering(name, piece, digest_of(data), data)

    async def read(self, piece: RemotePiece) -> bytes | PeerError:
        """What a peer's memory holds, or why it can't be read."""
        landing = np.zeros(piece.num_bytes, dtype=np.uint8)
        span = MemorySpan(landing.ctypes.data, landing.nbytes, owner=landing)
        async with asyncio.timeout(WAIT_S):
            error = await read(self.channel, piece, span, WAIT_S)
        return error or landing.tobytes()
