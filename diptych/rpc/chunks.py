"""The caller's side of the cache service: offer a chunk, borrow one, give it back.

A cache only ever saves time. So nothing here raises for what a peer does or fails to do, and nothing waits
without a deadline: an offer that comes to nothing and a loan that is a miss say why, in a word to count,
and work goes on.

Order matters to what the cache keeps, because a chunk is of no use without those before it. Offer the
chunks of a prompt from its tail, and give borrowed ones back from the tail: the head is then the last to be
evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.domain.errors import DiptychError
from diptych.domain.ids import ChunkHash
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.ports import RemotePiece
from diptych.rpc.dial import Dialer
from diptych.rpc.kv_codec import piece_from_proto, piece_to_proto
from diptych.rpc.status import domain_errors
from diptych.v1 import cache_pb2, cache_pb2_grpc

STORED: Final = "stored"
NOT_WANTED: Final = "not_wanted"
ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class Offered:
    """What became of an offer. `reason`: `stored`, `not_wanted` (held, or no room), or an error's class."""

    stored: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Lent:
    """A chunk that is readable at `piece` until given back or its lease ends. Check your copy's digest."""

    lease_id: int
    num_tokens: int
    piece: RemotePiece
    digest: bytes


@dataclass(frozen=True, slots=True)
class Missed:
    """No loan. `reason`: `absent`, or the class of the error that kept it away."""

    reason: str


class CacheClient:
    """Calls caches by address. Only addresses out of the registry belong here."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer

    async def offer(
        self,
        address: str,
        *,
        chunk_hash: ChunkHash,
        parent_hash: bytes = b"",
        fingerprint: str,
        num_tokens: int,
        piece: RemotePiece,
        digest: bytes,
        timeout_s: float,
    ) -> Offered:
        """Has the cache at `address` read a chunk. `piece` must stay readable until this returns; after a
        failure (of the connection, say) the cache may still read on for `timeout_s`, and its digest refuses
        what is wrong by then. Raises nothing but asyncio.CancelledError.
        """
        request = cache_pb2.OfferRequest(
            wire_version=WIRE_VERSION,
            chunk_hash=chunk_hash,
            parent_hash=parent_hash,
            fingerprint=fingerprint,
            num_tokens=num_tokens,
            piece=piece_to_proto(piece),
            digest=digest,
        )
        try:
            with domain_errors():
                response = await self._stub(address).Offer(request, timeout=timeout_s)
        except DiptychError as error:
            return Offered(False, type(error).__name__)
        return Offered(response.stored, STORED if response.stored else NOT_WANTED)

    async def lend(
        self, address: str, *, chunk_hash: ChunkHash, fingerprint: str, lease_s: float, timeout_s: float
    ) -> Lent | Missed:
        """Borrows a chunk for `lease_s` seconds, or as long as the cache allows. Raises nothing but
        asyncio.CancelledError; a loan whose answer was lost ends by itself.
        """
        request = cache_pb2.LendRequest(chunk_hash=chunk_hash, fingerprint=fingerprint, lease_s=lease_s)
        try:
            with domain_errors():
                response = await self._stub(address).Lend(request, timeout=timeout_s)
            if not response.found:
                return Missed(ABSENT)
            piece = piece_from_proto(response.piece)
        except DiptychError as error:
            return Missed(type(error).__name__)
        return Lent(response.lease_id, response.num_tokens, piece, response.digest)

    async def give_back(self, address: str, lease_id: int, *, timeout_s: float) -> bool:
        """Ends a loan early. False: the cache was not reached, and the lease ends by itself."""
        request = cache_pb2.GiveBackRequest(lease_id=lease_id)
        try:
            with domain_errors():
                await self._stub(address).GiveBack(request, timeout=timeout_s)
        except DiptychError:
            return False
        return True

    def _stub(self, address: str) -> cache_pb2_grpc.CacheAsyncStub:
        return cache_pb2_grpc.CacheStub(self._dialer.channel(address))
