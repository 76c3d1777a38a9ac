"""The hands of the cache: memory, reads, digests, and what the directory hears.

    offer ──▶ admit ──▶ read (peer to peer) ──▶ digest of our copy ──▶ landed ──▶ directory: add
                │             │ failed                │ differs
                │             └───────────────────────┴────▶ failed: the room is free again
                └── evicted ──▶ directory: remove

A fill is a task of its own and always runs to its end. The caller of `offer` may go away; the channel may
write our room until its read has ended, so nothing but that end frees it. Every read has a deadline, which
the channel keeps. Bytes are only ever lent after their digest was checked here; a reader checks its own
copy again.

Only memory that a registered worker announced is read: an address in a message is no reason to dial it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import xxhash

from diptych.domain.audit import Held, bounded
from diptych.domain.errors import (
    DigestMismatch,
    DiptychError,
    Draining,
    InvalidField,
    LayoutMismatch,
    PeerError,
    TransferFailed,
)
from diptych.domain.ids import ChunkHash
from diptych.domain.ports import KvChannel, MemorySpan, Region, RemotePiece
from diptych.domain.records import Tier
from diptych.rpc.failpoint import failpoint
from diptych.store.publisher import Publisher
from services.cache.tiers import Chunk, HostTier, Miss, Placed, Refusal, TierAudit

SETTLE_STEP_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Loan:
    """A chunk that stays readable at `piece` until `lease_id` is given back or its time is over."""

    lease_id: int
    chunk: Chunk
    piece: RemotePiece


class ChunkKeeper:
    """Stores and lends chunks. Belongs to one event loop."""

    def __init__(
        self,
        tier: HostTier,
        memory: MemorySpan,
        channel: KvChannel,
        publisher: Publisher,
        is_known: Callable[[Region], bool],
    ) -> None:
        """`memory` is the arena of `tier`. `is_known`: whether a registered worker serves this region."""
        self._tier = tier
        self._memory = memory
        self._channel = channel
        self.region = channel.register(memory)
        """Where peers read from us."""
        self._publisher = publisher
        self._is_known = is_known
        self._fills: set[asyncio.Task[DiptychError | None]] = set()
        self.counts: Counter[str] = Counter()
        """What became of offers and loans: `offer_…` and `lend_…`, each with its reason."""

    async def offer(self, chunk: Chunk, source: RemotePiece, timeout_s: float) -> bool:
        """Reads and keeps a chunk. False: not wanted (held, no room, busy).

        Raises InvalidField for a source that nobody registered, LayoutMismatch when the name is another
        layout's, TransferFailed or PeerLost when the read failed, DigestMismatch when the bytes are not
        those announced.
        """
        if not self._is_known(source.region):
            self.counts["offer_unknown_source"] += 1
            raise InvalidField("piece.region.address", f"no registered worker serves {source.region.address}")
        admission = self._tier.admit(chunk, time.monotonic())
        for name in admission.evicted:
            self._publisher.remove(name)
            self.counts["evicted"] += 1
        if admission.placed is None:
            assert admission.refusal
            self.counts[f"offer_{admission.refusal.value}"] += 1
            if admission.refusal is Refusal.FOREIGN:
                raise LayoutMismatch(f"{chunk.name.hex()} is held in another layout")
            return False
        fill = asyncio.create_task(self._fill(admission.placed, source, timeout_s))
        self._fills.add(fill)
        fill.add_done_callback(self._fills.discard)
        error = await asyncio.shield(fill)
        if error:
            raise error
        return True

    def lend(self, name: ChunkHash, fingerprint: str, lease_s: float, borrower: str = "") -> Loan | None:
        """Pins a chunk, or None: a miss."""
        lease_id = secrets.randbits(64)
        lent = self._tier.lend(name, fingerprint, lease_id, time.monotonic(), lease_s, borrower)
        if isinstance(lent, Miss):
            self.counts[f"lend_{lent.value}"] += 1
            return None
        self.counts["lend_hit"] += 1
        piece = RemotePiece(self.region, lent.extent.offset, lent.chunk.num_bytes)
        return Loan(lease_id, lent.chunk, piece)

    def give_back(self, lease_id: int) -> bool:
        """Ends a loan. False: it had ended, or is none of ours."""
        return self._tier.give_back(lease_id, time.monotonic())

    def drop(self) -> int:
        """Forgets what nobody uses; returns how many chunks."""
        dropped = self._tier.drop(time.monotonic())
        for name in dropped:
            self._publisher.remove(name)
        return len(dropped)

    def republish(self) -> None:
        """Tells the directory of everything held: it has lost its memory."""
        for name in self._tier.names():
            self._publisher.add(name, Tier.L2)

    def counted(self) -> TierAudit:
        """Counts by state, at this moment."""
        return self._tier.audit(time.monotonic())

    def audit(self) -> TierAudit:
        """As `counted`. Raises Internal when the books do not add up."""
        self._tier.check_integrity()
        return self.counted()

    def held(self) -> list[Held]:
        """The oldest loans and reads."""
        now = time.monotonic()
        loans = (
            Held("loan", lease.name.hex(), lease.borrower, now - lease.begin, ends_in_s=lease.end - now)
            for lease in self._tier.leases(now)
        )
        fills = (
            Held("fill", placed.chunk.name.hex(), "", now - placed.since) for placed in self._tier.filling()
        )
        return bounded(loans, fills)

    async def settle(self, deadline: float, has_borrowers: Callable[[], bool]) -> bool:
        """Waits, until `deadline` at most, for every read and every loan to end. Whether they have.

        Loans are not waited for once there is nobody left to read: `has_borrowers`.
        """
        while (audit := self.audit()).filling or (audit.leases and has_borrowers()):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(SETTLE_STEP_S)
        return True

    async def close(self) -> None:
        """Ends every read under way, and with it every fill; nobody can read from us afterwards."""
        await asyncio.to_thread(self._channel.close)  # it joins its threads
        if self._fills:
            await asyncio.wait(self._fills)

    async def _fill(self, placed: Placed, source: RemotePiece, timeout_s: float) -> DiptychError | None:
        chunk = placed.chunk
        room = self._memory.slice(placed.extent.offset, chunk.num_bytes)
        error = await self._read_checked(chunk, source, room, timeout_s)
        # Only here, after its end, has the channel let go of the room.
        if error:
            self._tier.failed(chunk.name)
            self.counts[f"offer_{type(error).__name__}"] += 1
        else:
            self._tier.landed(chunk.name)
            self.counts["offer_stored"] += 1
            self._publisher.add(chunk.name, Tier.L2)
        return error

    async def _read_checked(
        self, chunk: Chunk, source: RemotePiece, room: MemorySpan, timeout_s: float
    ) -> DiptychError | None:
        """Why the room does not hold the chunk's bytes; None: it does."""
        try:
            failpoint("cache.admitted")
            if (error := await read(self._channel, source, room, timeout_s)) is not None:
                return error
            failpoint("cache.read")
            right = await asyncio.to_thread(digest, room) == chunk.digest
        except DiptychError as error:
            return error
        if not right:
            return DigestMismatch(f"{chunk.name.hex()}: what was read is not what was announced")
        return None


async def read(
    channel: KvChannel, remote: RemotePiece, local: MemorySpan, deadline_s: float
) -> PeerError | None:
    """One read to its end: None when every byte arrived, else why not. Must not be cancelled meanwhile."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def on_done() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    try:
        under_way = channel.read(remote, local, deadline_s, on_done)
    except (ValueError, Draining) as refusal:
        return TransferFailed(str(refusal))
    await ended.wait()
    return under_way.error


def digest(data: MemorySpan) -> bytes:
    """XXH3-128, big-endian, of host memory. Lets other threads run meanwhile."""
    return xxhash.xxh3_128(data.view()).digest()


def host_memory(num_bytes: int) -> MemorySpan:
    """Page-aligned memory of our own, which takes no room before it is written. Raises InvalidField."""
    try:
        pages = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise InvalidField("budget_bytes", f"{num_bytes} bytes cannot be had: {error.strerror}") from error
    owner = (ctypes.c_ubyte * num_bytes).from_buffer(pages)
    return MemorySpan(ctypes.addressof(owner), num_bytes, owner=owner)
