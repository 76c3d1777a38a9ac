"""The rules of `deploy/redis/users.acl`: under them each role can do all that it does, and nothing of others.

The rules are loaded as they stand, for the test's shard, and with users of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import StoreUnavailable
from diptych.domain.ids import Attempt, Cell, ChunkHash, Epoch, RequestId, Tenant, WorkerId
from diptych.domain.records import PrefillJob, RequestRecord, Role, Tier, WorkerLoad, WorkerRecord
from diptych.store.bus import PrefillBus
from diptych.store.connect import connect
from diptych.store.directory import ChunkDirectory
from diptych.store.registry import Registry
from diptych.store.requests import RequestProjection
from diptych.store.secret import SharedSecret
from tests.architecture.tree import ROOT
from tests.support.valkey import StoreServer

RULES = (ROOT / "deploy/redis/users.acl").read_text(encoding="utf-8")
ROLES = ("router", "cache", "prefill", "decode")
CELL = Cell("c0")
EPOCH = Epoch(7)
CHUNK = ChunkHash(bytes(16))
LATER_SETINFO = "+client|setinfo"
"""Came with Redis 7.2; `entry.sh` leaves it out before."""

As = Callable[[str], Redis]


def rules_of(role: str, shard: str) -> list[str]:
    """The words of ACL SETUSER, parentheses kept together."""
    [line] = [line for line in RULES.splitlines() if line.startswith(f"user {role} on ")]
    words: list[str] = []
    for word in line.replace("{main}", f"{{{shard}}}").split()[3:]:
        if words and words[-1].startswith("(") and not words[-1].endswith(")"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def url_for(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}:{password}@{host}").geturl()


@pytest.fixture
async def as_role(redis: Redis, shard: str, store_server: StoreServer) -> AsyncIterator[As]:
    """Clients that may do what a role may."""
    info = await redis.info("server")
    is_7_0 = str(info["redis_version"]).startswith("7.0.") and "valkey_version" not in info
    clients, users = {}, []
    for role in ROLES:
        user, password = f"{role}-{secrets.token_hex(4)}", secrets.token_hex(8)
        rules = [word for word in rules_of(role, shard) if not (is_7_0 and word == LATER_SETINFO)]
        await redis.execute_command("ACL", "SETUSER", user, "reset", "on", f">{password}", *rules)
        users.append(user)
        clients[role] = await connect(url_for(store_server.url, user, password))
    await redis.execute_command("ACL", "LOG", "RESET")
    yield lambda role: clients[role]
    for client in clients.values():
        await client.aclose()
    await redis.execute_command("ACL", "DELUSER", *users)


def record(role: str) -> WorkerRecord:
    return WorkerRecord(WorkerId(f"{role}-0"), Role(role), EPOCH, CELL, "toy", "f" * 32, "h:1")


@pytest.mark.parametrize("role", ROLES)
async def test_every_role_registers_itself_and_sees_all(
    as_role: As, shard: str, redis: Redis, role: str
) -> None:
    others = Registry(redis, shard)
    other = record("decode" if role == "router" else "router")
    await others.register(other, ttl_s=30)
    registry, mine = Registry(as_role(role), shard), record(role)
    await registry.register(mine, ttl_s=30)
    assert not await registry.heartbeat(mine.worker_id, EPOCH, WorkerLoad())
    assert {found.worker_id for found in await registry.alive()} == {mine.worker_id, other.worker_id}
    with pytest.raises(StoreUnavailable, match="(?i)permission"):
        await Registry(as_role(role), shard).register(other, ttl_s=30)
    assert await registry.deregister(mine.worker_id, EPOCH)
    assert await others.deregister(other.worker_id, EPOCH)


async def test_decode_posts_and_prefill_claims(as_role: As, shard: str, redis: Redis) -> None:
    decode = PrefillBus(as_role("decode"), shard, CELL)
    prefill = PrefillBus(as_role("prefill"), shard, CELL)
    job = PrefillJob(RequestId("r0"), WorkerId("decode-0"), EPOCH, 1000)
    assert await prefill.claim("prefill-0", 0) is None  # nothing was ever posted: makes the stream
    await decode.post(job)
    claimed = await prefill.claim("prefill-0", 1000)
    assert claimed is not None
    assert claimed.job == job
    assert await prefill.sweep(0) == 1
    again = await prefill.claim("prefill-0", 1000)
    assert again is not None
    assert await prefill.done(again.entry_id)
    entry_id = await decode.post(job)
    assert await decode.claims([entry_id]) == [0.0]
    assert await decode.withdraw(entry_id)
    assert await PrefillBus(redis, shard, CELL).retire()
    assert await denials(redis) == []


async def test_a_claim_whose_answer_was_lost_is_given_back(as_role: As, shard: str, redis: Redis) -> None:
    await PrefillBus(as_role("decode"), shard, CELL).post(
        PrefillJob(RequestId("r0"), WorkerId("decode-0"), EPOCH, 1000)
    )
    assert await PrefillBus(as_role("prefill"), shard, CELL).claim("prefill-0", 1000) is not None
    started_anew = PrefillBus(as_role("prefill"), shard, CELL)
    claimed = await started_anew.claim("prefill-0", 1000)
    assert claimed is not None
    assert claimed.deliveries == 2
    assert await started_anew.done(claimed.entry_id)
    assert await PrefillBus(redis, shard, CELL).retire()
    assert await denials(redis) == []


async def test_decode_alone_tells_of_requests(as_role: As, shard: str, redis: Redis) -> None:
    told = RequestRecord(
        RequestId("r0"), Tenant(""), "admitted", WorkerId("decode-0"), EPOCH, Attempt(0), 1, 1, 9
    )
    projection = RequestProjection(as_role("decode"), shard)
    await projection.put(told)
    await projection.end(told)
    assert await projection.get(RequestId("r0")) == told
    assert await denials(redis) == []
    for role in ("router", "cache", "prefill"):
        with pytest.raises(StoreUnavailable, match="(?i)permission"):
            await RequestProjection(as_role(role), shard).get(RequestId("r0"))
    await redis.delete(f"diptych:{{{shard}}}:request:r0")


async def test_cache_publishes_and_prefill_looks_up(as_role: As, shard: str, redis: Redis) -> None:
    holder = WorkerId("cache-0")
    cache, prefill = ChunkDirectory(as_role("cache"), shard), ChunkDirectory(as_role("prefill"), shard)
    await cache.publish(holder, EPOCH, {CHUNK: Tier.L2})
    assert CHUNK in await prefill.locate([CHUNK], [(holder, EPOCH)])
    assert await cache.withdraw(holder, EPOCH, [CHUNK]) == 1
    await cache.publish(holder, EPOCH, {CHUNK: Tier.L2})
    assert await cache.sweep_worker(holder, EPOCH) == 1
    assert await denials(redis) == []
    for role in ("router", "prefill", "decode"):
        with pytest.raises(StoreUnavailable, match="(?i)permission"):
            await ChunkDirectory(as_role(role), shard).publish(WorkerId(f"{role}-0"), EPOCH, {CHUNK: Tier.L2})


async def test_routers_alone_know_their_secret(as_role: As, shard: str, redis: Redis) -> None:
    assert await SharedSecret(as_role("router"), shard, "resume").agree(b"x") == b"x"
    assert await SharedSecret(as_role("router"), shard, "resume").agree(b"y") == b"x"
    assert await denials(redis) == []
    for role in ("cache", "prefill", "decode"):
        with pytest.raises(StoreUnavailable):
            await SharedSecret(as_role(role), shard, "resume").agree(b"z")
    await redis.delete(f"diptych:{{{shard}}}:secret:resume")


async def denials(redis: Redis) -> list[object]:
    """What was refused by the rules, be it that nobody noticed."""
    return list(await redis.execute_command("ACL", "LOG"))
