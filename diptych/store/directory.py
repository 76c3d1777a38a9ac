"""Who holds which chunk of KV.

    chunk:<hash>     hash: worker@epoch -> tier; what readers look up
    holds:<holder>   set of chunk hashes; only there so that a dead holder can be swept without a scan
    holds:<worker>   set of epochs; only there so that the next start of a worker finds what the last one left

A location is a hint. Readers pass over holders that are not alive, and a chunk that is not there any more
is a miss. Entries go when nothing about them was published for `ttl_s`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from redis.asyncio import Redis

from diptych.domain.ids import ChunkHash, Epoch, WorkerId
from diptych.domain.records import ChunkLocation, Tier
from diptych.store.library import Library
from diptych.store.shard import CALL_TIMEOUT_S, Argument, Reply, Shard

LIBRARY = Library.read("directory")
PIECE = 500
"""Most chunks in one call: the server does nothing else meanwhile."""
ENTRY_TTL_S = 3600.0

Item = TypeVar("Item")
TIERS = {tier.value.encode(): tier for tier in Tier}
NEAREST_FIRST = list(Tier)


class ChunkDirectory:
    """The chunks of a shard. Every method raises StoreUnavailable; what was done in pieces before stays
    done.
    """

    def __init__(
        self, redis: Redis, shard: str, *, ttl_s: float = ENTRY_TTL_S, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        self._shard = Shard(redis, shard, timeout_s)
        self._chunks = self._shard.key("chunk", "")
        self._ttl_ms = round(ttl_s * 1000)

    async def publish(self, worker_id: WorkerId, epoch: Epoch, tiers: Mapping[ChunkHash, Tier]) -> None:
        """Says in which tier a holder has these chunks: one tier for a chunk, the last one said."""
        holder = _holder(worker_id, epoch)
        for piece in _pieces(list(tiers)):
            keys = [self._holds(holder), *map(self._key, piece)]
            words = [tiers[chunk].value for chunk in piece]
            await self._call("publish", keys, [holder, self._ttl_ms, len(self._chunks), *words])

    async def withdraw(self, worker_id: WorkerId, epoch: Epoch, chunks: Iterable[ChunkHash]) -> int:
        """Says that a holder has these no more, in whatever tier. Returns how many were there."""
        holder, num_removed = _holder(worker_id, epoch), 0
        for piece in _pieces(list(chunks)):
            keys = [self._holds(holder), *map(self._key, piece)]
            removed = await self._call("withdraw", keys, [holder, len(self._chunks)])
            assert isinstance(removed, int)
            num_removed += removed
        return num_removed

    async def locate(
        self, chunks: Sequence[ChunkHash], alive: Collection[tuple[WorkerId, Epoch]]
    ) -> dict[ChunkHash, tuple[ChunkLocation, ...]]:
        """Where these chunks are, nearest tier first; those that nobody alive holds are left out."""
        holders = {_holder(worker_id, epoch).encode(): (worker_id, epoch) for worker_id, epoch in alive}
        located: dict[ChunkHash, tuple[ChunkLocation, ...]] = {}
        for piece in _pieces(chunks):
            reply = await self._call("locate", [self._key(chunk) for chunk in piece], [])
            assert isinstance(reply, bytes)
            for chunk, line in zip(piece, reply.split(b"\n"), strict=True):
                if locations := _locations(line, holders):
                    located[chunk] = locations
        return located

    async def succeed(self, worker_id: WorkerId, epoch: Epoch) -> int:
        """Notes that this start of a worker holds chunks now, and removes all that earlier ones held.

        Returns how many chunks that were. To be repeated within `ttl_s`, which the note lives too.
        """
        key, num_swept = self._shard.key("holds", worker_id), 0
        noted, *_ = await self._shard.ask(
            [["SPOP", key, PIECE], ["SADD", key, epoch], ["PEXPIRE", key, self._ttl_ms]], "succeed"
        )
        for raw in noted if isinstance(noted, (list, set)) else ():
            if raw.isdigit() and int(raw) != epoch:
                num_swept += await self.sweep_worker(worker_id, Epoch(int(raw)))
        return num_swept

    async def sweep_worker(self, worker_id: WorkerId, epoch: Epoch) -> int:
        """Removes all that a dead epoch held, piece by piece. Returns how many chunks that were."""
        holder, num_swept = _holder(worker_id, epoch), 0
        while swept := await self._call("sweep", [self._holds(holder)], [holder, self._chunks, PIECE]):
            assert isinstance(swept, int)
            num_swept += swept
        await self._shard.ask([["SREM", self._shard.key("holds", worker_id), epoch]], "sweep")
        return num_swept

    async def _call(self, verb: str, keys: list[str], args: list[Argument]) -> Reply:
        return await self._shard.call(LIBRARY, verb, keys, args)

    def _key(self, chunk: ChunkHash) -> str:
        return self._chunks + chunk.hex()

    def _holds(self, holder: str) -> str:
        return self._shard.key("holds", holder)


def _holder(worker_id: WorkerId, epoch: Epoch) -> str:
    return f"{worker_id}@{epoch}"


def _locations(line: bytes, holders: dict[bytes, tuple[WorkerId, Epoch]]) -> tuple[ChunkLocation, ...]:
    """What `locate` says about one chunk. What is none of ours is passed over."""
    words = line.split(b"\t") if line else []
    found = [
        ChunkLocation(*holders[holder], TIERS[tier])
        for holder, tier in zip(words[::2], words[1::2], strict=True)
        if holder in holders and tier in TIERS
    ]
    return tuple(sorted(found, key=lambda location: NEAREST_FIRST.index(location.tier)))


def _pieces(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[start : start + PIECE] for start in range(0, len(items), PIECE))
