"""The prefill queue of a cell: a stream, and one consumer group in which each prefill worker is a consumer.

    post ──▶ waiting ──claim──▶ claimed ──done──▶ gone
                ▲                  │
                └── sweep, or the same consumer's next claim after a lost answer

**A claim may be lost.** When its answer never arrives (cancelled, timed out, connection broken), the server
may still have given the job away, even minutes later: a stopped server works off what lies in its sockets
when it continues. So after such a claim, and at a consumer's first, the next one gives back what is pending
in our name and was never handed out here. What escapes that is found by `sweep`, once it has been idle.

**`done` may be lost** too: it is then sent again with the next claim.

Jobs can therefore come twice. The decode worker's answer to `Begin` decides which one counts.

One claim at a time for each consumer name; give each worker its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from diptych.domain.errors import Overloaded, StoreUnavailable
from diptych.domain.ids import Cell
from diptych.domain.records import ClaimedJob, PrefillJob
from diptych.store.entries import Entry, MalformedEntry, entry_of, unix_ms
from diptych.store.library import Library
from diptych.store.shard import CALL_TIMEOUT_S, Argument, Reply, Shard

LIBRARY = Library.read("bus")
GROUP = "prefill"
STREAM_TTL_S = 3600.0
"""An unused stream goes after an hour; claims make it again."""
MAX_DEPTH = 10_000
MAX_DELIVERIES = 3
SWEEP_PIECE = 100


class PrefillBus:
    """Jobs of one cell. Every method raises StoreUnavailable."""

    def __init__(
        self,
        redis: Redis,
        shard: str,
        cell: Cell,
        *,
        max_depth: int = MAX_DEPTH,
        max_deliveries: int = MAX_DELIVERIES,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._shard = Shard(redis, shard, timeout_s)
        self._stream = self._shard.key("prefill", cell)
        self._max_depth = max_depth
        self._max_deliveries = max_deliveries
        self._held: set[str] = set()
        self._owed: set[str] = set()
        self._certain: set[str] = set()
        self.dropped: Counter[str] = Counter()
        """Jobs taken off the bus undone, by why: malformed, expired, exhausted (delivered too often)."""

    async def post(self, job: PrefillJob) -> str:
        """Puts a job at the end and returns its entry's id. Not repeated by itself: after StoreUnavailable
        the job may or may not be there. Raises Overloaded when the bus is full.
        """
        raw = msgspec.json.encode(job)
        args = (_ms(STREAM_TTL_S), self._max_depth, raw, unix_ms(job.deadline_unix_s))
        entry_id = await self._call("post", args, repeat=False)
        if entry_id is None:
            raise Overloaded(f"the prefill bus holds {self._max_depth} jobs already")
        assert isinstance(entry_id, bytes)
        return entry_id.decode()

    async def claim(self, consumer: str, block_ms: int) -> ClaimedJob | None:
        """The next job, waiting for one up to `block_ms` (0: not at all). None: there was none.

        May be cancelled at any moment. Malformed, expired and exhausted entries are dropped on the way and
        counted.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + block_ms / 1000
        await self._settle(consumer)
        while True:
            entry = await self._take(consumer, max(0, round((give_up - loop.time()) * 1000)))
            if entry is None:
                return None
            if (claimed := self._judge(entry)) is not None:
                self._held.add(claimed.entry_id)
                return claimed
            await self._call("done", [entry.entry_id])

    async def done(self, entry_id: str) -> bool:
        """Takes a claimed job off the bus. False: it was not there any more, somebody else may have it.

        After StoreUnavailable it needs no repetition: the next claim does that.
        """
        try:
            removed = await self._call("done", [entry_id])
        except (StoreUnavailable, asyncio.CancelledError):
            self._owed.add(entry_id)
            raise
        self._held.discard(entry_id)
        return bool(removed)

    async def withdraw(self, entry_id: str) -> bool:
        """Takes back a job that we posted, claimed or not. False: it was not there any more."""
        return bool(await self._call("done", [entry_id]))

    async def claims(self, entry_ids: Sequence[str]) -> list[float | None]:
        """For how many seconds each of these jobs has been claimed: 0.0 where nobody has, None where it is
        gone."""
        if not entry_ids:
            return []
        ages_ms = await self._call("claims", entry_ids)
        assert isinstance(ages_ms, list)
        return [_age_s(age_ms) for age_ms in ages_ms]

    async def sweep(self, min_idle_ms: int) -> int:
        """Gives jobs that were claimed at least so long ago and never finished to others; returns how many.

        Each gets a new entry id. Expired ones, and those that were delivered too often, are dropped and
        counted.
        """
        num_redelivered = 0
        while fates := self._fates(
            await self._call("sweep", [min_idle_ms, self._max_deliveries, SWEEP_PIECE])
        ):
            num_redelivered += self._count(fates)
        return num_redelivered

    async def depth(self) -> int:
        """Jobs that nobody has claimed."""
        depth = await self._call("depth", [])
        assert isinstance(depth, int)
        return depth

    async def retire(self) -> bool:
        """Removes the stream if no job is left, claimed or not; returns whether it is gone."""
        return bool(await self._call("retire", []))

    async def _settle(self, consumer: str) -> None:
        if self._owed:
            owed = list(self._owed)
            await self._call("done", owed)
            self._owed.difference_update(owed)
            self._held.difference_update(owed)
        if consumer not in self._certain:
            known = sorted(self._held)
            self._count(self._fates(await self._call("give_back", [consumer, self._max_deliveries, *known])))

    async def _take(self, consumer: str, block_ms: int) -> Entry | None:
        block: list[Argument] = ["BLOCK", block_ms] if block_ms else []
        read: list[Argument] = [
            "XREADGROUP", "GROUP", GROUP, consumer, "COUNT", 1, *block, "STREAMS", self._stream, ">",
        ]  # fmt: skip
        for _ in range(3):
            self._certain.discard(consumer)
            # TIME follows the read in the same write: the moment of the claim in the store's own clock.
            answer, now = await self._shard.ask([read, ["TIME"]], "claim", block_ms / 1000)
            if not isinstance(answer, ResponseError):
                self._certain.add(consumer)
                return entry_of(answer, now)
            if not str(answer).startswith(("NOGROUP", "UNBLOCKED", "WRONGTYPE")):
                raise StoreUnavailable(f"claim: {answer}") from answer
            # Never used, expired or flushed, perhaps while we waited.
            await self._call("open", [_ms(STREAM_TTL_S)])
        raise StoreUnavailable("claim: the stream was taken away three times")

    def _judge(self, entry: Entry) -> ClaimedJob | None:
        try:
            claimed = entry.read()
        except MalformedEntry:
            self.dropped["malformed"] += 1
            return None
        if claimed.deliveries > self._max_deliveries:
            self.dropped["exhausted"] += 1
            return None
        if entry.is_past(claimed.job.deadline_unix_s):
            self.dropped["expired"] += 1
            return None
        return claimed

    async def _call(self, verb: str, args: Sequence[Argument], *, repeat: bool = True) -> Reply:
        return await self._shard.call(LIBRARY, verb, [self._stream], args, repeat=repeat)

    @staticmethod
    def _fates(reply: Reply) -> list[str]:
        assert isinstance(reply, list)
        return [item.decode() for item in reply if isinstance(item, bytes)]

    def _count(self, fates: Iterable[str]) -> int:
        fate_counts = Counter(fates)
        num_redelivered = fate_counts.pop("redelivered", 0)
        self.dropped.update(fate_counts)
        return num_redelivered


def _age_s(age_ms: Reply) -> float | None:
    assert isinstance(age_ms, int)
    if age_ms < 0:
        return 0.0 if age_ms == -1 else None
    return max(age_ms, 1) / 1000


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
