"""Who is alive.

A worker registers once a process and then sends heartbeats. Both carry the whole record, so a heartbeat
after a flush registers anew; its answer says so, and the owner announces what else it has in the store.
When two epochs of a worker exist (it was restarted, and the old process was only stopped), the later one
wins: the older is told `Stale`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
from redis.asyncio import Redis

from diptych.domain.errors import Stale
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import Role, WorkerLoad, WorkerRecord
from diptych.store.library import Library
from diptych.store.shard import CALL_TIMEOUT_S, Shard

LIBRARY = Library.read("registry")
DECODER = msgspec.json.Decoder(WorkerRecord)


@dataclass(frozen=True, slots=True)
class _Registration:
    record: WorkerRecord
    ttl_ms: int
    since: str
    """Server time (us) of the first announcement, as text: Redis keeps it, we only hand it back."""


class Registry:
    """The workers of a shard. Every method raises StoreUnavailable."""

    def __init__(self, redis: Redis, shard: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._shard = Shard(redis, shard, timeout_s)
        self._index = self._shard.key("workers")
        self._ours: dict[WorkerId, _Registration] = {}
        self.num_malformed = 0
        """Records that could not be read and were passed over."""

    async def register(self, record: WorkerRecord, ttl_s: float) -> None:
        """Announces a worker for `ttl_s` seconds; an older epoch of it is replaced.

        Raises Stale when this process registered that epoch before and a later one has come since.
        """
        ours = self._ours.get(record.worker_id)
        since = ours.since if ours and ours.record.epoch == record.epoch else "0"
        await self._announce(_Registration(record, max(1, round(ttl_s * 1000)), since))

    async def heartbeat(self, worker_id: WorkerId, epoch: Epoch, load: WorkerLoad) -> bool:
        """Renews a registration made here. True: the store had forgotten it, and with it all that we ever
        told.

        Raises Stale when a later epoch has replaced ours, or when this epoch was never registered here.
        """
        ours = self._ours.get(worker_id)
        if ours is None or ours.record.epoch != epoch:
            raise Stale(f"worker {worker_id} has no registration of epoch {epoch} in this process")
        return await self._announce(replace(ours, record=replace(ours.record, load=load)))

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        """Removes that epoch, never another. True if it was there."""
        ours = self._ours.get(worker_id)
        if ours and ours.record.epoch == epoch:
            del self._ours[worker_id]
        keys = [self._worker_key(worker_id), self._index]
        return bool(await self._shard.call(LIBRARY, "leave", keys, [worker_id, epoch]))

    async def alive(self, role: Role | None = None) -> list[WorkerRecord]:
        """The workers whose TTL has not run out, by id; only those of exactly that role when one is given."""
        reply = await self._shard.call(LIBRARY, "alive", [self._index], [self._worker_key("")])
        assert isinstance(reply, bytes)
        if not reply:
            return []
        records = [record for line in reply.split(b"\n") if (record := self._read(line)) is not None]
        return sorted((r for r in records if role in (None, r.role)), key=lambda r: r.worker_id)

    async def _announce(self, registration: _Registration) -> bool:
        record = registration.record
        keys = [self._worker_key(record.worker_id), self._index]
        raw = msgspec.json.encode(record)
        args = (record.worker_id, record.epoch, registration.since, registration.ttl_ms, raw)
        reply = await self._shard.call(LIBRARY, "announce", keys, args)
        assert isinstance(reply, list)
        accepted, *rest = reply
        if not accepted:
            raise Stale(f"worker {record.worker_id}: epoch {record.epoch} was replaced by a later one")
        since, is_new = rest
        assert isinstance(since, bytes)
        self._ours[record.worker_id] = replace(registration, since=since.decode())
        return bool(is_new)

    def _worker_key(self, worker_id: str) -> str:
        return self._shard.key("worker", worker_id)

    def _read(self, line: bytes) -> WorkerRecord | None:
        try:
            return DECODER.decode(line)
        except msgspec.DecodeError:
            self.num_malformed += 1
            return None
