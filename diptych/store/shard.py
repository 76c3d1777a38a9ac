"""The one place where commands leave and answers come back.

**Names.** `diptych:{shard}:…`: the braces are Redis Cluster's hash tag, so that all keys of a shard, and
every key that one function call touches, lie on one server.

**Errors.** Whatever keeps an answer away (no connection, timeout, full memory, a server that loads or was
demoted) becomes `StoreUnavailable`, once, in `answering`. After a failover the address leads to another
server: connections to one that was demoted are closed, so that the next call finds the new one.

**Lost functions.** A server that was restarted or flushed knows our functions no more: the library is
loaded again and the call repeated once.

**Repeats.** After a broken connection nobody knows whether the call was done. Calls that may be done twice
are repeated a few times within their timeout; the others are the caller's to judge.

**Cancelling.** A call that is cancelled or timed out mid-answer closes its connection: the next user of the
pool can't read an answer that is not its own. (redis-py does so in `read_response`; a test holds it to
that.)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from diptych.domain.errors import InvalidField, StoreUnavailable
from diptych.store.library import Library

CALL_TIMEOUT_S = 1.0
MAX_TRIES = 4
FIRST_PAUSE_S = 0.02

Reply = int | bytes | None | list["Reply"]
Argument = str | bytes | int


@asynccontextmanager
async def answering(what: str, timeout_s: float) -> AsyncIterator[None]:
    """Bounds what runs inside to `timeout_s` seconds and turns the store's failures into StoreUnavailable."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"{what}: no answer within {timeout_s:g} s") from error
    except (RedisError, OSError, ValueError) as error:  # ValueError: an answer that is no RESP
        raise StoreUnavailable(f"{what}: {error}") from error


class Shard:
    """One shard's names and calls on a shared client."""

    def __init__(self, redis: Redis, name: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        if not name or set(name) & set("{}:"):
            raise InvalidField("shard", f"{name!r} must be a name without braces and colons")
        self._redis = redis
        self._prefix = f"diptych:{{{name}}}:"
        self.timeout_s = timeout_s

    def key(self, *parts: str) -> str:
        """`diptych:{shard}:part:part…`"""
        return self._prefix + ":".join(parts)

    async def call(
        self,
        library: Library,
        verb: str,
        keys: Sequence[str],
        args: Sequence[Argument],
        *,
        repeat: bool = True,
    ) -> Reply:
        """Runs one of our functions. `repeat`: whether it may be done twice. Raises StoreUnavailable."""
        name = library.function(verb)
        async with answering(name, self.timeout_s), self._leaving_demoted():
            for pause_s in self._pauses(repeat):
                try:
                    return await self._fcall(library, name, keys, args)
                except AuthenticationError:
                    raise
                except RedisConnectionError:
                    if pause_s is None:
                        raise
                    await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last try returns or raises")

    async def ask(
        self, commands: Sequence[Sequence[Argument]], what: str, wait_s: float = 0.0
    ) -> list[object]:
        """Sends plain commands in one write and returns an answer to each; an answer may be a ResponseError.

        `wait_s`: how long a blocking command may block on top of the timeout. Raises StoreUnavailable.
        """
        async with answering(what, self.timeout_s + wait_s), self._leaving_demoted():
            async with self._redis.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                answers = cast("list[object]", await pipe.execute(raise_on_error=False))
            for answer in answers:
                if isinstance(answer, ReadOnlyError):
                    raise answer
            return answers

    async def _fcall(
        self, library: Library, name: str, keys: Sequence[str], args: Sequence[Argument]
    ) -> Reply:
        command = ("FCALL", name, len(keys), *keys, *args)
        try:
            return await self._execute(*command)
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise
        await self._execute("FUNCTION", "LOAD", "REPLACE", library.source)
        return await self._execute(*command)

    async def _execute(self, *command: Argument) -> Reply:
        return cast("Reply", await self._redis.execute_command(*command))  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def _leaving_demoted(self) -> AsyncIterator[None]:
        try:
            yield
        except ReadOnlyError:
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise

    @staticmethod
    def _pauses(repeat: bool) -> list[float | None]:
        tries = MAX_TRIES if repeat else 1
        return [*(FIRST_PAUSE_S * 2**i * random.uniform(0.5, 1.5) for i in range(tries - 1)), None]
