"""The secret that routers agree on through the store, and what they do without the store."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from diptych.domain.errors import InvalidField, StoreUnavailable
from diptych.domain.ids import Epoch, RequestId, Tenant, WorkerId
from diptych.store.secret import SharedSecret
from services.router.decisions import WorkerRef
from services.router.tokens import Claims, KeyAgreement, ResumeTokens
from tests.support.valkey import StoreServer, eventually, keys_of, paused

CLAIMS = Claims(RequestId("r"), Tenant(""), WorkerRef(WorkerId("d"), Epoch(1)))


async def believes(reader: ResumeTokens, minter: ResumeTokens) -> bool:
    try:
        return reader.read(minter.mint(CLAIMS), "") == CLAIMS
    except InvalidField:
        return False


async def forget(redis: Redis, shard: str) -> None:
    for key in await keys_of(redis, shard):
        await redis.delete(key)


async def test_whoever_comes_first_brings_it(redis: Redis, shard: str) -> None:
    secret = SharedSecret(redis, shard, "resume")
    assert await secret.agree(b"first") == b"first"
    assert await secret.agree(b"second") == b"first"
    assert await SharedSecret(redis, shard, "other").agree(b"second") == b"second"
    assert await redis.pttl(secret._key) == -1, "it must be there for a router that is started again"
    await forget(redis, shard)


async def test_a_key_of_another_kind_is_an_error(redis: Redis, shard: str) -> None:
    secret = SharedSecret(redis, shard, "resume")
    await redis.rpush(secret._key, "x")
    with pytest.raises(StoreUnavailable):
        await secret.agree(b"first")
    await forget(redis, shard)


async def test_routers_of_a_shard_believe_each_other(redis: Redis, shard: str) -> None:
    a, b = ResumeTokens(), ResumeTokens()
    before = a.mint(CLAIMS)
    async with (
        KeyAgreement(b, SharedSecret(redis, shard, "resume")),
        KeyAgreement(a, SharedSecret(redis, shard, "resume")),
    ):
        assert await believes(a, b)
        assert await believes(b, a)
        assert a.read(before, "") == CLAIMS, "what it minted with its own key is good still"
    await forget(redis, shard)


async def test_a_store_that_forgot_gets_it_back(redis: Redis, shard: str) -> None:
    a, b = ResumeTokens(), ResumeTokens()
    store = SharedSecret(redis, shard, "resume")
    async with KeyAgreement(a, store) as agreement:
        token = a.mint(CLAIMS)
        await forget(redis, shard)
        agreement.again()

        async def back() -> bool:
            return bool(await keys_of(redis, shard))

        await eventually(back)
        async with KeyAgreement(b, store):
            assert b.read(token, "") == CLAIMS
    await forget(redis, shard)


async def test_a_router_that_came_first_after_the_loss_is_believed_too(redis: Redis, shard: str) -> None:
    a, b = ResumeTokens(), ResumeTokens()
    store = SharedSecret(redis, shard, "resume")
    async with KeyAgreement(a, store) as agreement:
        await forget(redis, shard)
        async with KeyAgreement(b, store):
            agreement.again()

            async def agreed() -> bool:
                return await believes(a, b) and await believes(b, a)

            await eventually(agreed)
    await forget(redis, shard)


async def test_without_the_store_a_router_has_its_own_until_it_is_back(
    redis: Redis, shard: str, store_server: StoreServer
) -> None:
    a, b = ResumeTokens(), ResumeTokens()
    agreement = KeyAgreement(a, SharedSecret(redis, shard, "resume", timeout_s=0.2))
    async with AsyncExitStack() as stack:
        with paused(store_server):
            await stack.enter_async_context(agreement)
            token = a.mint(CLAIMS)
            assert a.read(token, "") == CLAIMS

        async def told() -> bool:
            return bool(await keys_of(redis, shard))

        await eventually(told)
        await stack.enter_async_context(KeyAgreement(b, SharedSecret(redis, shard, "resume")))
        assert b.read(token, "") == CLAIMS
    await forget(redis, shard)
