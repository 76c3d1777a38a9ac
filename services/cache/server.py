"""What the cache answers: messages are checked here, field by field, before the keeper hears of them.

Checked first are wire version and fingerprint, since nothing else of a message can be trusted to mean what
it says where these differ. Sizes are bounded by the budget before any memory is touched. Errors of the
domain become status in `diptych.rpc.interceptors`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, Final, cast

import grpc

from diptych.domain.errors import Draining, Internal, InvalidField, LayoutMismatch
from diptych.domain.ids import CHUNK_TOKENS, ChunkHash
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.records import WorkerRecord
from diptych.rpc.failpoint import failpoint
from diptych.rpc.inspection import held_messages
from diptych.rpc.kv_codec import piece_from_proto, piece_to_proto
from diptych.v1 import cache_pb2, cache_pb2_grpc, common_pb2, worker_pb2, worker_pb2_grpc
from services.cache.config import CacheSettings
from services.cache.loop import ChunkKeeper
from services.cache.tiers import Chunk

HASH_BYTES: Final = 16
DIGEST_BYTES: Final = 16
FINGERPRINT: Final = re.compile(r"[0-9a-f]{32}")

Context = grpc.aio.ServicerContext[Any, Any]


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """`Offer`, `Lend`, `GiveBack`."""

    def __init__(self, keeper: ChunkKeeper, settings: CacheSettings) -> None:
        self._keeper = keeper
        self._budget_bytes = settings.arena_bytes
        self._read_s = settings.read_s
        self._is_leaving = False

    def leave(self) -> None:
        """Takes and lends nothing more; loans can still be given back."""
        self._is_leaving = True

    async def Offer(  # noqa: N802
        self, request: cache_pb2.OfferRequest, context: Context
    ) -> cache_pb2.OfferResponse:
        """Raises LayoutMismatch, InvalidField, Draining, and what `ChunkKeeper.offer` raises."""
        failpoint("cache.offer")
        if request.wire_version != WIRE_VERSION:
            raise LayoutMismatch(f"wire version {request.wire_version}; this side speaks {WIRE_VERSION}")
        _check_fingerprint(request.fingerprint)
        _check_length("chunk_hash", request.chunk_hash, HASH_BYTES)
        _check_length("digest", request.digest, DIGEST_BYTES)
        if request.parent_hash:
            _check_length("parent_hash", request.parent_hash, HASH_BYTES)
        if not 1 <= request.num_tokens <= CHUNK_TOKENS:
            raise InvalidField("num_tokens", f"must be from 1 to {CHUNK_TOKENS}, is {request.num_tokens}")
        source = piece_from_proto(request.piece)
        if not 1 <= source.num_bytes <= self._budget_bytes:
            raise InvalidField(
                "piece.num_bytes", f"must be from 1 to {self._budget_bytes}, is {source.num_bytes}"
            )
        self._check_staying()
        chunk = Chunk(
            ChunkHash(request.chunk_hash),
            request.fingerprint,
            request.num_tokens,
            source.num_bytes,
            request.digest,
            ChunkHash(request.parent_hash) if request.parent_hash else None,
        )
        left_s = cast("float | None", context.time_remaining())
        timeout_s = self._read_s if left_s is None else max(0.001, min(left_s, self._read_s))
        stored = await self._keeper.offer(chunk, source, timeout_s)
        failpoint("cache.offered")
        return cache_pb2.OfferResponse(stored=stored)

    async def Lend(  # noqa: N802
        self, request: cache_pb2.LendRequest, context: Context
    ) -> cache_pb2.LendResponse:
        """Raises LayoutMismatch, InvalidField, Draining. A miss is no error."""
        failpoint("cache.lend")
        _check_fingerprint(request.fingerprint)
        _check_length("chunk_hash", request.chunk_hash, HASH_BYTES)
        if not (math.isfinite(request.lease_s) and request.lease_s > 0):
            raise InvalidField("lease_s", f"must be above 0 and finite, is {request.lease_s}")
        self._check_staying()
        loan = self._keeper.lend(
            ChunkHash(request.chunk_hash), request.fingerprint, request.lease_s, context.peer()
        )
        if loan is None:
            return cache_pb2.LendResponse(found=False)
        failpoint("cache.lent")
        return cache_pb2.LendResponse(
            found=True,
            lease_id=loan.lease_id,
            num_tokens=loan.chunk.num_tokens,
            piece=piece_to_proto(loan.piece),
            digest=loan.chunk.digest,
        )

    async def GiveBack(  # noqa: N802
        self, request: cache_pb2.GiveBackRequest, context: Context
    ) -> cache_pb2.GiveBackResponse:
        """An id that is unknown, of an earlier process perhaps, changes nothing and is no error."""
        failpoint("cache.give_back")
        self._keeper.give_back(request.lease_id)
        failpoint("cache.given_back")
        return cache_pb2.GiveBackResponse()

    def _check_staying(self) -> None:
        if self._is_leaving:
            raise Draining("this cache is leaving")


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """`Inspect`, `DropCache`."""

    def __init__(self, keeper: ChunkKeeper, record: Callable[[], WorkerRecord], max_leases: int) -> None:
        self._keeper = keeper
        self._record = record
        self._max_leases = max_leases

    async def Inspect(  # noqa: N802
        self, request: worker_pb2.InspectRequest, context: Context
    ) -> worker_pb2.WorkerStatus:
        """Load as counted now. A read under way counts as running, a lease as a slot."""
        mine, audit, held, leak = self._record(), self._keeper.counted(), self._keeper.held(), ""
        try:
            self._keeper.audit()
        except Internal as error:
            leak = str(error)
        return worker_pb2.WorkerStatus(
            worker_id=mine.worker_id,
            role=worker_pb2.ROLE_CACHE,
            epoch=mine.epoch,
            address=mine.rpc_address,
            load=worker_pb2.Load(
                num_running=audit.filling,
                slots_used=audit.leases,
                slots_total=self._max_leases,
                bytes_used=audit.used_bytes,
                bytes_total=audit.total_bytes,
            ),
            counters=[
                common_pb2.Fallback(reason=reason, count=count)
                for reason, count in sorted(self._keeper.counts.items())
            ],
            pid=os.getpid(),
            held=held_messages(held),
            num_held=audit.filling + audit.leases,
            leaked=int(bool(leak)),
            leak=leak,
        )

    async def DropCache(  # noqa: N802
        self, request: worker_pb2.DropCacheRequest, context: Context
    ) -> worker_pb2.DropCacheResponse:
        """Chunks that are lent or being read stay."""
        return worker_pb2.DropCacheResponse(num_dropped=self._keeper.drop())


def _check_fingerprint(fingerprint: str) -> None:
    if not FINGERPRINT.fullmatch(fingerprint):
        raise LayoutMismatch("the layout's fingerprint is not 32 hex digits")


def _check_length(field: str, value: bytes, num_bytes: int) -> None:
    if len(value) != num_bytes:
        raise InvalidField(field, f"must have {num_bytes} bytes, has {len(value)}")
