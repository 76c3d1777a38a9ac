"""What a shard holds, and what of it belongs to nobody alive: for `diptych audit`.

It only reads, with plain commands and never more than `PIECE` keys in one call, so that the server is never
held up; other processes write meanwhile, so a single look may catch something in the middle of a change. Who
judges looks twice. At most `max_keys` keys are looked at, `NAMED` of each kind of oddity are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from diptych.domain.errors import StoreUnavailable
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import RequestRecord
from diptych.store import bus
from diptych.store.entries import Entry, MalformedEntry
from diptych.store.shard import Argument, Shard

PIECE = 500
NAMED = 100
MAX_KEYS = 200_000
CALL_TIMEOUT_S = 5.0
NEVER_EXPIRES = -1
GONE = -2

_Entries = list[tuple[bytes, list[bytes]]]
_Pending = list[tuple[bytes, bytes, int, int]]

KINDS = {
    b"worker": b"hash",
    b"workers": b"zset",
    b"prefill": b"stream",
    b"request": b"hash",
    b"chunk": b"hash",
    b"holds": b"set",
    b"events": b"stream",
    b"secret": b"string",
}
"""Kind of key, and its type in Redis."""
LASTING = frozenset({b"secret"})
"""Kinds that stay for as long as the store does."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a prefill worker took and has not taken off the bus yet."""

    request_id: str
    consumer: str
    idle_s: float
    deliveries: int


@dataclass(frozen=True, slots=True)
class BusAudit:
    """One cell's bus: jobs that nobody has claimed, claims, and jobs whose decode worker is dead."""

    cell: str
    num_waiting: int
    claims: tuple[Claim, ...]
    num_claims: int
    orphans: tuple[str, ...]


@dataclass(slots=True)
class ShardAudit:
    """What one look at a shard found. Keys are named without the shard's prefix."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Keys by kind."""
    foreign: list[str] = field(default_factory=list)
    """Keys of no kind of ours, or of another type than theirs."""
    undying: list[str] = field(default_factory=list)
    """Keys that never expire, and should."""
    num_requests: Counter[str] = field(default_factory=Counter)
    """Request records by state."""
    orphan_requests: list[str] = field(default_factory=list)
    """Requests that have not ended and whose decode worker is dead: "id of worker@epoch"."""
    locations: Counter[str] = field(default_factory=Counter)
    """Chunk locations by holder, worker@epoch."""
    dead_holders: Counter[str] = field(default_factory=Counter)
    """Those of holders that are dead."""
    buses: list[BusAudit] = field(default_factory=list)
    truncated: bool = False
    """There were more keys than were looked at."""

    @property
    def num_keys(self) -> int:
        return sum(self.kinds.values()) + len(self.foreign)


class ShardAuditor:
    """Looks at one shard. Raises StoreUnavailable."""

    def __init__(
        self, redis: Redis, shard: str, *, max_keys: int = MAX_KEYS, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        self._shard = Shard(redis, shard, timeout_s)
        self._prefix = self._shard.key("").encode()
        self._max_keys = max_keys

    async def look(self, alive: Collection[tuple[WorkerId, Epoch]]) -> ShardAudit:
        """One look; `alive` are the workers that are registered."""
        living = {f"{worker_id}@{epoch}".encode() for worker_id, epoch in alive}
        audit = ShardAudit()
        seen: set[bytes] = set()  # a scan may name a key twice
        async for keys in self._scan():
            fresh = [key for key in keys if key not in seen]
            seen.update(fresh)
            await self._look_at(fresh, living, audit)
            if len(seen) >= self._max_keys:
                audit.truncated = True
                break
        return audit

    async def _scan(self) -> AsyncIterator[list[bytes]]:
        cursor = 0
        while True:
            command: list[Argument] = [
                "SCAN", cursor, "MATCH", _escaped(self._prefix) + b"*", "COUNT", PIECE,
            ]  # fmt: skip
            cursor, keys = cast("tuple[int, list[bytes]]", (await self._ask([command]))[0])
            for start in range(0, len(keys), PIECE):
                yield keys[start : start + PIECE]
            if cursor == 0:
                return

    async def _look_at(self, keys: Sequence[bytes], living: set[bytes], audit: ShardAudit) -> None:
        if not keys:
            return
        questions: list[list[Argument]] = [[verb, key] for key in keys for verb in ("TYPE", "PTTL")]
        facts = await self._ask(questions)
        by_kind: dict[bytes, list[bytes]] = {}
        for key, found, left_ms in zip(keys, facts[::2], facts[1::2], strict=True):
            name = key.removeprefix(self._prefix)
            kind = name.partition(b":")[0]
            if left_ms == GONE:
                continue
            if KINDS.get(kind) != found:
                _name(audit.foreign, f"{_text(name)} ({_text(cast('bytes', found))})")
                continue
            audit.kinds[_text(kind)] += 1
            by_kind.setdefault(kind, []).append(key)
            if left_ms == NEVER_EXPIRES and kind not in LASTING:
                _name(audit.undying, _text(name))
        await self._requests(by_kind.get(b"request", []), living, audit)
        await self._chunks(by_kind.get(b"chunk", []), living, audit)
        for key in by_kind.get(b"holds", []):
            holder = key.removeprefix(self._prefix + b"holds:")
            if b"@" in holder and holder not in living:
                audit.dead_holders.setdefault(_text(holder), 0)
        for key in by_kind.get(b"prefill", []):
            audit.buses.append(await self._bus(key, living))

    async def _requests(self, keys: Sequence[bytes], living: set[bytes], audit: ShardAudit) -> None:
        raws = await self._ask([["HGET", key, "record"] for key in keys]) if keys else []
        for key, raw in zip(keys, raws, strict=True):
            try:
                record = msgspec.json.decode(cast("bytes", raw or b""), type=RequestRecord)
            except (msgspec.DecodeError, TypeError):
                _name(audit.foreign, f"{_text(key.removeprefix(self._prefix))} (no record)")
                continue
            audit.num_requests[record.state] += 1
            owner = f"{record.decode_worker}@{record.decode_epoch}"
            if not record.finish_reason and owner.encode() not in living:
                _name(audit.orphan_requests, f"{record.request_id} of {owner}")

    async def _chunks(self, keys: Sequence[bytes], living: set[bytes], audit: ShardAudit) -> None:
        replies = await self._ask([["HKEYS", key] for key in keys]) if keys else []
        for holders in replies:
            for holder in cast("list[bytes]", holders) if isinstance(holders, list) else []:
                audit.locations[_text(holder)] += 1
                if holder not in living:
                    audit.dead_holders[_text(holder)] += 1

    async def _bus(self, key: bytes, living: set[bytes]) -> BusAudit:
        reply = await self._shard.call(bus.LIBRARY, "look", [_text(key)], [NAMED])
        length, num_claims, entries, pending = cast("tuple[int, int, _Entries, _Pending]", reply)
        requests, orphans = {}, []
        for entry_id, request_id, owner in _jobs(entries):
            requests[entry_id] = request_id
            if owner.encode() not in living:
                orphans.append(f"{request_id} of {owner}")
        claims = tuple(
            Claim(requests.get(entry_id, _text(entry_id)), _text(consumer), idle_ms / 1000, deliveries)
            for entry_id, consumer, idle_ms, deliveries in pending
        )
        cell = _text(key.removeprefix(self._prefix).removeprefix(b"prefill:"))
        return BusAudit(cell, max(0, length - num_claims), claims, num_claims, tuple(orphans))

    async def _ask(self, commands: Sequence[Sequence[Argument]]) -> list[object]:
        """The answers; what a key of another type answers is an error of its own, and is returned."""
        answers = await self._shard.ask(commands, "audit")
        for answer in answers:
            if isinstance(answer, ResponseError) and not str(answer).startswith("WRONGTYPE"):
                raise StoreUnavailable(f"audit: {answer}") from answer
        return answers


def _jobs(entries: _Entries) -> Iterator[tuple[bytes, str, str]]:
    """Entry, request and decode worker of each job. What can't be read belongs to nobody."""
    for entry_id, flat in entries:
        fields = dict(zip(flat[::2], flat[1::2], strict=False))
        try:
            job = Entry(_text(entry_id), fields, 0.0).read().job
        except MalformedEntry:
            yield entry_id, _text(entry_id), "nobody"
            continue
        yield entry_id, job.request_id, f"{job.decode_worker}@{job.decode_epoch}"


def _name(names: list[str], name: str) -> None:
    if len(names) < NAMED:
        names.append(name)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _escaped(prefix: bytes) -> bytes:
    """For MATCH, whose wildcards a shard's name may contain."""
    return b"".join(b"\\" + bytes([byte]) if byte in b"*?[]\\^" else bytes([byte]) for byte in prefix)
