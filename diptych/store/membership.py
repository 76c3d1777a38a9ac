"""One process's place in the registry, and what it last knew of its peers.

Everything in the registry is soft state, so membership is a loop and not a handshake:

    start ──▶ register ──▶ beat, every `heartbeat_s` ──▶ … ──▶ stop: deregister this epoch
                             │          │        └── a later epoch has our name ──▶ `replaced`: the loop ends
                             │          └── no answer: not `available`; `peers` stay; beat again
                             └── we were forgotten: the beat registered us anew; `on_forgotten` is called

Who is right when the store is gone or has lost its memory: **the last snapshot**. While the store does not
answer, `peers` keeps what it knew. When it answers but had forgotten us (flushed, restarted empty), it has
forgotten the others too; then what was known stays beside what is registered anew for one `ttl_s`, the time
in which everyone alive has come back. A peer in the snapshot may be dead; whoever dials it finds out, and
that is always allowed.

Beats are jittered, so that a store that comes back does not hear all workers at once.

A registration under our name with a later epoch is a newer start of the same worker: we leave it the name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable

from diptych.domain.errors import Stale, StoreUnavailable
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import Role, WorkerRecord
from diptych.store.registry import Registry

log = logging.getLogger(__name__)


def new_epoch() -> Epoch:
    """63 random bits, never zero: drawn once per process start."""
    return Epoch(1 + secrets.randbelow((1 << 63) - 1))


class Membership:
    """Keeps one process registered. Belongs to one event loop."""

    def __init__(
        self,
        registry: Registry,
        record: Callable[[], WorkerRecord],
        heartbeat_s: float,
        ttl_s: float,
        on_forgotten: Callable[[], None] = lambda: None,
    ) -> None:
        """`record` tells who we are and how loaded, at the moment of asking; id and epoch never change.

        `on_forgotten` is called when the store had lost us, and so whatever else we announced there. It runs
        in the loop and must not block or raise.
        """
        self._registry = registry
        self._record = record
        self._heartbeat_s = heartbeat_s
        self._ttl_s = ttl_s
        self._on_forgotten = on_forgotten
        self._peers: dict[WorkerId, WorkerRecord] = {}
        self._answered_at: float | None = None
        """When the store last answered; None after a failure."""
        self._recovering_until = 0.0
        self._stopping = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self.replaced = asyncio.Event()
        """Set for good once a later start of this worker has taken the name. We should leave."""

    @property
    def available(self) -> bool:
        """Whether the store answered lately: within the last `ttl_s`, and nothing has failed since."""
        return self._answered_at is not None and time.monotonic() - self._answered_at < self._ttl_s

    def peers(self, *roles: Role) -> tuple[WorkerRecord, ...]:
        """The workers last known alive, ourselves among them, of these roles; of all where none is given."""
        return tuple(peer for peer in self._peers.values() if not roles or peer.role in roles)

    def peer(self, worker_id: WorkerId, epoch: Epoch | None = None) -> WorkerRecord | None:
        """One worker last known alive, of this epoch if one is asked for; else None."""
        peer = self._peers.get(worker_id)
        return peer if peer and epoch in (None, peer.epoch) else None

    async def refresh(self) -> None:
        """Looks who is alive now, not only at the next beat. Never raises; without the store nothing
        changes."""
        with contextlib.suppress(StoreUnavailable):
            await self._look_around()

    async def start(self) -> None:
        """Registers, takes the first snapshot and starts to beat.

        Raises StoreUnavailable, and then has started nothing.
        """
        await self._registry.register(self._record(), self._ttl_s)
        await self._look_around()
        self._beating = asyncio.create_task(self._run(), name="membership")

    async def stop(self, timeout_s: float = 2.0) -> None:
        """Ends the beat and deregisters this epoch, if the store answers in time. Never raises."""
        self._stopping.set()
        beating, self._beating = self._beating, None
        if beating is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                # The beat under way ends by itself: cancelled, it could leave a command half sent.
                await asyncio.shield(beating)
                if not self.replaced.is_set():
                    mine = self._record()
                    await self._registry.deregister(mine.worker_id, mine.epoch)
        except (TimeoutError, StoreUnavailable) as error:
            log.warning("not deregistered, the registration ends by itself in %g s: %s", self._ttl_s, error)
        finally:
            self._answered_at = None
            beating.cancel()
            await asyncio.wait({beating})

    async def _run(self) -> None:
        while not await self._stopped_within(self._heartbeat_s * random.uniform(0.8, 1.2)):
            try:
                await self._beat()
            except Stale as error:
                log.error("a later start has taken this worker's name: %s", error)
                self.replaced.set()
                return
            except StoreUnavailable as error:
                self._lost(str(error))
            except Exception:
                log.exception("a heartbeat failed")
                self._lost("unexpected")

    async def _beat(self) -> None:
        mine = self._record()
        if await self._registry.heartbeat(mine.worker_id, mine.epoch, mine.load):
            self._recovering_until = time.monotonic() + self._ttl_s
            log.warning("the store had forgotten us; registered again")
            self._on_forgotten()
        await self._look_around()

    async def _look_around(self) -> None:
        alive = {peer.worker_id: peer for peer in await self._registry.alive()}
        now = time.monotonic()
        if self._record().worker_id not in alive:
            # Flushed after our heartbeat; the next one will hear of it.
            self._recovering_until = now + self._ttl_s
        self._peers = {**self._peers, **alive} if now < self._recovering_until else alive
        self._answered_at = now

    def _lost(self, why: str) -> None:
        if self._answered_at is not None:
            log.warning("the store does not answer; on with what is known: %s", why)
        self._answered_at = None

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False
