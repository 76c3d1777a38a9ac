"""What a request's owner says about it, for whoever asks: routers after a restart, `diptych status`.

A projection: the decode worker's own state is the truth, and a write that fails is made up for by the next.
Writes are ordered by (placement, version); see `functions/requests.lua`.

    put ─▶ renew, every `ttl_s / 4` ─▶ … ─▶ end ─▶ ENDED_TTL_S ─▶ gone
             └── the owner died: gone within `ttl_s`
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec
from redis.asyncio import Redis

from diptych.domain.errors import Stale
from diptych.domain.ids import Epoch, RequestId, WorkerId
from diptych.domain.records import RequestRecord
from diptych.store.library import Library
from diptych.store.shard import CALL_TIMEOUT_S, Shard

LIBRARY = Library.read("requests")
RUNNING_TTL_S = 12.0
"""After the owner's last sign of life."""
ENDED_TTL_S = 60.0
RENEW_PIECE = 500
"""Most records in one call: it holds the server up for well under a millisecond."""


class Standing(Enum):
    """What a renewal found."""

    OURS = 1
    """It lives on."""
    GONE = 0
    """The store has lost it: write it again."""
    TAKEN = -1
    """Another placement owns the request since: let go of it."""


class RequestProjection:
    """`request:<id>` of a shard. Every method raises StoreUnavailable."""

    def __init__(
        self,
        redis: Redis,
        shard: str,
        *,
        running_ttl_s: float = RUNNING_TTL_S,
        ended_ttl_s: float = ENDED_TTL_S,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._shard = Shard(redis, shard, timeout_s)
        self._running_ttl_s = running_ttl_s
        self._ended_ttl_s = ended_ttl_s

    @property
    def renew_s(self) -> float:
        """How often an owner should renew what it has: three renewals may be lost."""
        return self._running_ttl_s / 4

    async def put(self, record: RequestRecord) -> None:
        """Writes if this placement owns the request and the version is newer; the same record again is fine.

        Raises Stale, and changes nothing, when the request was placed elsewhere since or a newer version is
        there.
        """
        await self._write(record, self._running_ttl_s)

    async def end(self, record: RequestRecord) -> None:
        """As `put`, for the last record: it goes away soon after."""
        await self._write(record, self._ended_ttl_s)

    async def renew(
        self, worker_id: WorkerId, epoch: Epoch, request_ids: Sequence[RequestId]
    ) -> dict[RequestId, Standing]:
        """Keeps the records of live requests of that worker for another TTL, in pieces of `RENEW_PIECE`."""
        standing: dict[RequestId, Standing] = {}
        args = (f"{worker_id}@{epoch}", round(self._running_ttl_s * 1000))
        for start in range(0, len(request_ids), RENEW_PIECE):
            piece = request_ids[start : start + RENEW_PIECE]
            reply = await self._shard.call(LIBRARY, "renew", [self._key(name) for name in piece], args)
            assert isinstance(reply, list)
            standing |= {name: Standing(found) for name, found in zip(piece, reply, strict=True)}
        return standing

    async def get(self, request_id: RequestId) -> RequestRecord | None:
        """The newest record; None when there is none, or none that can be read."""
        raw = await self._shard.call(LIBRARY, "get", [self._key(request_id)], [])
        if not isinstance(raw, bytes):
            return None
        try:
            return msgspec.json.decode(raw, type=RequestRecord)
        except msgspec.DecodeError:
            return None

    async def _write(self, record: RequestRecord, ttl_s: float) -> None:
        owner = f"{record.decode_worker}@{record.decode_epoch}"
        raw = msgspec.json.encode(record)
        args = (record.placement, record.version, owner, round(ttl_s * 1000), raw)
        reply = await self._shard.call(LIBRARY, "put", [self._key(record.request_id)], args)
        assert isinstance(reply, list)
        accepted, *newer = reply
        if not accepted:
            raise Stale(
                f"request {record.request_id}: version {record.version} of placement {record.placement} "
                f"by {owner} comes too late: {newer} is there"
            )

    def _key(self, request_id: RequestId) -> str:
        return self._shard.key("request", request_id)
