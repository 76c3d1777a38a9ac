"""Connecting: one client a process, shared by all rooms of the store.

Timeouts. redis-py's own socket timeout wraps each send in `asyncio.wait_for`, which up to Python 3.11
swallows a cancellation that arrives at the moment the send completes (measured: 185 of 600 cancelled
blocking reads went on to block; none without that timeout). So sockets have no timeout here; `shard.Shard`
puts one `asyncio.timeout` around each whole call instead, and redis-py closes a connection whose answer was
not read to the end.
"""

from __future__ import annotations

import re

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError

from diptych.domain.errors import InvalidField, StoreUnavailable, Unsupported
from diptych.store.shard import CALL_TIMEOUT_S, answering

Connection = Redis
"""What the other rooms pass around without importing Redis."""

SCHEMES = ("redis", "rediss", "unix")
OPTIONS = re.compile(r"db|username|password|ssl_\w+")
MAX_CONNECTIONS = 32
LEAST_MAJOR_VERSION = 7
"""Functions came with Redis 7; every Valkey has them."""


def redacted(url: str) -> str:
    """The URL as it may be printed: without passwords, be they before the host or in the query. A URL that is
    wrong loses rather more than too little.
    """
    scheme, separator, rest = url.rpartition("://")
    if not rest.startswith("/"):
        credentials, at, host = rest.rpartition("@")
        user, colon, _ = credentials.partition(":")
        rest = user + (colon and ":***") + at + host
    rest = re.sub(r"([^?&=]*password[^=&]*=)[^&]*", r"\1***", rest, flags=re.IGNORECASE)
    return scheme + separator + rest


def client(url: str, *, max_connections: int = MAX_CONNECTIONS) -> Redis:
    """A client for `url`, not connected yet: connections are opened when they are first needed, and again
    after a loss. Raises InvalidField for a URL that names no server.
    """
    where = redacted(url)
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise InvalidField("redis_url", f"{where!r} must begin with redis://, rediss:// or unix://")
    # redis-py lets a URL set any argument of a connection; most would undo what is set below.
    options = {pair.partition("=")[0] for pair in rest.partition("?")[2].split("&") if pair}
    if unknown := sorted(name for name in options if not OPTIONS.fullmatch(name)):
        raise InvalidField("redis_url", f"{where!r} may not set {', '.join(unknown)}")
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,  # the call's own timeout bounds the wait for a connection too
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),  # `Shard` knows which calls may be repeated
            protocol=2,  # no push messages: nothing arrives on a connection that was not asked for
            client_name="diptych",
        )
    except ValueError:  # its text may quote a part of the password
        raise InvalidField(
            "redis_url", f"{where!r} is malformed; special characters in a password need percent-encoding"
        ) from None
    return Redis.from_pool(pool)


async def connect(url: str, *, timeout_s: float = CALL_TIMEOUT_S) -> Redis:
    """A client whose server has answered. Close it with `aclose()`.

    Raises StoreUnavailable when the server can't be reached or refuses us, Unsupported when it is too old,
    InvalidField when the URL is wrong. The messages name the URL without its secrets.
    """
    redis = client(url)
    where = redacted(url)
    try:
        async with answering("the first greeting", timeout_s):
            facts: dict[str, object] = await redis.info("server")
    except StoreUnavailable as error:
        await redis.aclose()
        raise StoreUnavailable(f"the store at {where} {_advice(error)}") from error
    version = str(facts.get("redis_version", "0"))
    if int(version.partition(".")[0]) < LEAST_MAJOR_VERSION:
        await redis.aclose()
        raise Unsupported(f"the store at {where} is Redis {version}; functions need Redis 7 or any Valkey")
    return redis


def _advice(error: StoreUnavailable) -> str:
    if isinstance(error.__cause__, AuthenticationError) or "NOAUTH" in str(error):
        return f"refuses our password: set user and password in REDIS_URL ({error.__cause__})"
    return (
        f"does not answer ({str(error.__cause__) or error}): start Redis or Valkey there, "
        "point REDIS_URL elsewhere, or leave it unset so that `diptych up` starts its own"
    )
