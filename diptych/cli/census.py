"""Asks every process of a system what it holds: workers by `Inspect`, routers by `Status`, and the store.

The store knows all processes; where it isn't known, a router's list must do. One that does not answer within
`ANSWER_S` is part of the answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from diptych.cli.certificates import tls_from_environment
from diptych.cli.whereabouts import find_router, newest
from diptych.client import AsyncClient
from diptych.domain.errors import DiptychError
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import Role
from diptych.rpc.dial import Dialer
from diptych.rpc.inspection import Account, read_account
from diptych.rpc.status import domain_errors
from diptych.rpc.tls import TlsSettings
from diptych.store.audit import ShardAudit, ShardAuditor
from diptych.store.connect import connect
from diptych.store.registry import Registry
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:  # the name is in the stubs only
    from diptych.v1.worker_pb2_grpc import WorkerAsyncStub

ANSWER_S: Final = 3.0
AT_A_TIME: Final = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where to ask. `store` may be empty: then only the workers that the router lists are asked."""

    router: str
    store: str
    shard: str


@dataclass(frozen=True, slots=True)
class Member:
    """One registered process, and its answer."""

    worker_id: WorkerId
    role: Role | None
    epoch: Epoch
    address: str
    account: Account | None = None
    num_live: int = 0
    """Of a router: requests that have not ended."""
    problem: str = ""
    """Why it did not answer."""


@dataclass(frozen=True, slots=True)
class Census:
    """Everybody's answer, at about one moment."""

    members: tuple[Member, ...]
    store: ShardAudit | None


def find_place(router: str, store: str, shard: str) -> Place:
    """What was given, else the environment, else the newest `diptych up` of this user.

    Raises InvalidField for an address that is none, PeerLost when nothing is known.
    """
    store = store or os.environ.get("DIPTYCH_REDIS_URL", "") or os.environ.get("REDIS_URL", "")
    if store:
        return Place("", store, shard or "main")
    running = None if router or os.environ.get("DIPTYCH_ROUTER") else newest()
    if running is not None:
        return Place(running.router, running.store, running.shard)
    return Place(find_router(router), "", shard or "main")


async def take(place: Place, *, with_store: bool = True) -> Census:
    """Asks everybody. Raises StoreUnavailable or PeerLost where those cannot be listed."""
    tls = tls_from_environment()
    async with Dialer(tls) as dialer:
        if not place.store:
            return Census(await _ask_all(dialer, tls, await _listed_by_router(place.router, tls)), None)
        redis = await connect(place.store)
        try:
            # The store first: what a process says after it was seen there is newer, never older.
            listed = await _registered(Registry(redis, place.shard))
            alive = {(member.worker_id, member.epoch) for member in listed}
            audit = await ShardAuditor(redis, place.shard).look(alive) if with_store else None
            return Census(await _ask_all(dialer, tls, listed), audit)
        finally:
            await redis.aclose()


async def _registered(registry: Registry) -> list[Member]:
    return [
        Member(record.worker_id, record.role, record.epoch, record.rpc_address)
        for record in await registry.alive()
    ]


async def _listed_by_router(address: str, tls: TlsSettings | None) -> list[Member]:
    async with AsyncClient(address, tls=tls) as client:
        workers = (await client.status()).workers
    return [Member(WorkerId(w.worker_id), w.role, Epoch(w.epoch), w.address) for w in workers]


async def _ask_all(dialer: Dialer, tls: TlsSettings | None, listed: Sequence[Member]) -> tuple[Member, ...]:
    room = asyncio.Semaphore(AT_A_TIME)

    async def ask(member: Member) -> Member:
        async with room:
            try:
                return await _ask(dialer, tls, member)
            except DiptychError as error:
                return replace(member, problem=str(error) or type(error).__name__)

    return tuple(await asyncio.gather(*(ask(member) for member in listed)))


async def _ask(dialer: Dialer, tls: TlsSettings | None, member: Member) -> Member:
    if member.role is Role.ROUTER:
        async with AsyncClient(member.address, timeout_s=ANSWER_S, tls=tls) as client:
            return replace(member, num_live=(await client.status()).num_live)
    stub: WorkerAsyncStub = WorkerStub(dialer.channel(member.address))
    with domain_errors():
        status = await stub.Inspect(worker_pb2.InspectRequest(fresh=True), timeout=ANSWER_S)
    return replace(member, account=read_account(status))
