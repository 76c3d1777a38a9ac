"""A secret that all processes of a shard agree on: whoever comes first brings it.

It stays for as long as the store does, so that whoever is started again finds it. A store that loses its
memory gets it back from whoever still knows it.
"""

from __future__ import annotations

from redis.asyncio import Redis

from diptych.domain.errors import StoreUnavailable
from diptych.store.shard import CALL_TIMEOUT_S, Argument, Shard


class SharedSecret:
    """`secret:<name>` of a shard."""

    def __init__(self, redis: Redis, shard: str, name: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._shard = Shard(redis, shard, timeout_s)
        self._key = self._shard.key("secret", name)

    async def agree(self, ours: bytes) -> bytes:
        """The one that is there; `ours`, from now on, where there is none. Raises StoreUnavailable."""
        commands: list[list[Argument]] = [["SET", self._key, ours, "NX"], ["GET", self._key]]
        found = (await self._shard.ask(commands, "the shared secret"))[1]
        if not isinstance(found, bytes) or not found:
            raise StoreUnavailable(f"the shared secret: {found!r} is none")
        return found
