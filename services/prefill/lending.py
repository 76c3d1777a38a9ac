"""Whole chunks between this worker and the cache services: offered when computed, borrowed when already
there.

Nothing here is needed for a correct answer. Every call has a short deadline, every failure is a miss that is
counted, and a loan that is not given back ends by its lease.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from diptych.domain.audit import Held
from diptych.domain.errors import StoreUnavailable
from diptych.domain.fallbacks import Fallback
from diptych.domain.hashing import chunk_hashes
from diptych.domain.ids import CHUNK_TOKENS, BlockHash, ChunkHash
from diptych.domain.ports import RemotePiece
from diptych.domain.records import ChunkLocation, Role, WorkerRecord
from diptych.rpc.chunks import CacheClient, Lent
from diptych.store.directory import ChunkDirectory
from diptych.store.membership import Membership
from services.prefill.held import attempt_name
from services.prefill.messages import AttemptKey, BorrowedChunk, ChunkAnnounced

OFFER_TIMEOUT_S = 2.0
LOOKUP_TIMEOUT_S = 0.25
LEND_TIMEOUT_S = 0.25
LEASE_S = 15.0
SHUN_S = 2.0
"""A cache that let a call wait in vain is not asked for so long: it may be stopped, and chunks that it does
not read keep their room."""


@dataclass(frozen=True, slots=True)
class Loan:
    """A chunk that a cache pins for us."""

    address: str
    lease_id: int
    begun_at: float


@dataclass(frozen=True, slots=True)
class Borrowings:
    """What was lent of a prompt, from its start; and why the next chunk was not, where it was said to be
    there."""

    chunks: list[BorrowedChunk] = field(default_factory=list)
    fallback: Fallback | None = None


class Lending:
    """Belongs to one event loop."""

    def __init__(
        self, membership: Membership, directory: ChunkDirectory, client: CacheClient, fingerprint: str
    ) -> None:
        self._membership = membership
        self._directory = directory
        self._client = client
        self._fingerprint = fingerprint
        self._loans: dict[AttemptKey, list[Loan]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shunned: dict[str, float] = {}
        """Addresses, and until when."""
        self.counters: Counter[str] = Counter()

    def offer(self, chunk: ChunkAnnounced, read: Callable[[], None]) -> None:
        """Has a cache read a chunk; `read` is called when it is done with it, whatever came of it."""
        caches = self._caches("offer")
        if not caches or not chunk.chunk_hash:
            read()
            return
        cache = caches[int.from_bytes(chunk.chunk_hash[:8], "big") % len(caches)]
        piece = chunk.piece_over({channel.kind for channel in cache.channels})
        if piece is None:
            self.counters["offer_no_channel"] += 1
            read()
            return
        task = asyncio.create_task(self._offer(cache.rpc_address, chunk, piece, read), name="offer chunk")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def borrow(self, key: AttemptKey, root: BlockHash, tokens: Sequence[int]) -> Borrowings:
        """Leading whole chunks that caches lend. At least one token is left to compute."""
        if len(tokens) <= CHUNK_TOKENS or not self._caches("borrow"):
            return Borrowings()
        names = chunk_hashes(root, tokens[:-1])
        where = await self._locate(names)
        if where is None:
            self.counters[Fallback.BORROW_NO_DIRECTORY] += 1
            return Borrowings(fallback=Fallback.BORROW_NO_DIRECTORY)
        borrowed: list[BorrowedChunk] = []
        for index, name in enumerate(names):
            locations = where.get(name, ())
            lent = await self._lend(key, name, locations)
            if lent is None:
                refused = Fallback.BORROW_REFUSED if locations else None
                self.counters.update([refused] if refused else [])
                return Borrowings(borrowed, refused)
            borrowed.append(BorrowedChunk(index, lent.piece, lent.digest))
        return Borrowings(borrowed)

    def give_back(self, key: AttemptKey) -> None:
        """Ends all loans of an attempt, the tail first, so that the head is kept longest."""
        loans = self._loans.pop(key, [])
        if loans:
            task = asyncio.create_task(self._give_back(loans), name="give chunks back")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def held(self, now: float) -> Iterator[Held]:
        """Loans that were not given back yet; `now` by `time.monotonic()`."""
        for key, loans in self._loans.items():
            for loan in loans:
                age_s = now - loan.begun_at
                name = f"{attempt_name(key)} lease {loan.lease_id:x}"
                yield Held("loan", name, loan.address, age_s, ends_in_s=LEASE_S - age_s)

    async def close(self) -> None:
        """Ends what is under way; caches end the loans themselves."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _caches(self, wish: str) -> list[WorkerRecord]:
        peers = self._membership.peers(Role.CACHE)
        asked = [peer for peer in peers if not self._shuns(peer.rpc_address)]
        if len(asked) < len(peers):
            self.counters[f"{wish}_shunned"] += 1
        return sorted(asked, key=lambda peer: peer.worker_id)

    def _shuns(self, address: str) -> bool:
        return self._shunned.get(address, 0.0) > time.monotonic()

    def _heard(self, address: str, reason: str) -> None:
        if reason == "DeadlineExceeded":
            self._shunned[address] = time.monotonic() + SHUN_S
        else:
            self._shunned.pop(address, None)

    async def _offer(
        self, address: str, chunk: ChunkAnnounced, piece: RemotePiece, read: Callable[[], None]
    ) -> None:
        try:
            offered = await self._client.offer(
                address,
                chunk_hash=ChunkHash(chunk.chunk_hash),
                parent_hash=chunk.parent_hash,
                fingerprint=self._fingerprint,
                num_tokens=chunk.num_tokens,
                piece=piece,
                digest=chunk.digest,
                timeout_s=OFFER_TIMEOUT_S,
            )
            self.counters[f"offer_{offered.reason}"] += 1
            self._heard(address, offered.reason)
        finally:
            read()

    async def _locate(self, names: Sequence[ChunkHash]) -> dict[ChunkHash, tuple[ChunkLocation, ...]] | None:
        """None: nobody could say."""
        alive = {(peer.worker_id, peer.epoch) for peer in self._membership.peers(Role.CACHE)}
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await self._directory.locate(names, alive)
        except (StoreUnavailable, TimeoutError):
            return None

    async def _lend(
        self, key: AttemptKey, name: ChunkHash, locations: Sequence[ChunkLocation]
    ) -> Lent | None:
        for location in locations:
            peer = self._membership.peer(location.worker_id, location.epoch)
            if peer is None or self._shuns(peer.rpc_address):
                continue
            lent = await self._client.lend(
                peer.rpc_address,
                chunk_hash=name,
                fingerprint=self._fingerprint,
                lease_s=LEASE_S,
                timeout_s=LEND_TIMEOUT_S,
            )
            if isinstance(lent, Lent):
                self._loans.setdefault(key, []).append(
                    Loan(peer.rpc_address, lent.lease_id, time.monotonic())
                )
                if lent.num_tokens == CHUNK_TOKENS:
                    self.counters["borrowed"] += 1
                    return lent
            else:
                self.counters[f"borrow_{lent.reason}"] += 1
                self._heard(peer.rpc_address, lent.reason)
        return None

    async def _give_back(self, loans: Sequence[Loan]) -> None:
        for loan in reversed(loans):
            await self._client.give_back(loan.address, loan.lease_id, timeout_s=LEND_TIMEOUT_S)
