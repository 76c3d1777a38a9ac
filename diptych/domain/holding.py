"""One request's blocks over all layer groups, and the pools that they come from.

Who owns a block, when (time runs to the right; one line for each kind of block of one request):

                     open              grow            publish_upto         release
    cached prefix     ├── shared, read only ────────────────────────────────────┤ cached again
    computed, full                      ├── ours, writable ──┤── shared, read only ──┤ cached
    last, part full                     ├── ours, writable ─────────────────────┤ free
    twin of a full one                  ├── ours (another block has the name) ──┤ free

A `Holding` is the owner. The scheduler that opened it calls `release` exactly once, whatever the request's
end, after the last step or unpack that names its tables has finished. Nobody else frees. All groups grow
together or not at all, so that their tables always cover the same positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from diptych.domain.blocks import BlockPool, OutOfBlocks, PoolAudit
from diptych.domain.errors import Internal
from diptych.domain.ids import BlockHash, BlockId


class KvPools:
    """The pools of all layer groups of one worker, in the layout's order of groups."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        """Raises ValueError unless there are pools and they agree on the tokens in a block."""
        if len({pool.block_tokens for pool in pools}) != 1:
            raise ValueError("the pools of one worker need one number of tokens in a block")
        self.pools = tuple(pools)
        self.block_tokens = pools[0].block_tokens

    @property
    def free_tokens(self) -> int:
        """Positions that a new request without cached prefix could hold now."""
        return min(pool.num_free for pool in self.pools) * self.block_tokens

    @property
    def total_tokens(self) -> int:
        """Positions that one request could hold in empty pools."""
        return min(pool.num_blocks for pool in self.pools) * self.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of one table that covers `num_tokens` positions."""
        return -(-num_tokens // self.block_tokens)

    def cached_tokens(self, hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Tokens that `open` with the same arguments would find. Touches nothing."""
        return self._cached_blocks(hashes, max_tokens) * self.block_tokens

    def can_open(self, hashes: Sequence[BlockHash], max_tokens: int, num_tokens: int) -> bool:
        """Whether `open(hashes, max_tokens)` and then `grow(num_tokens)` would succeed now."""
        held = hashes[: self._cached_blocks(hashes, max_tokens)]
        rest = self.num_blocks(num_tokens) - len(held)
        return all(rest <= pool.num_free - pool.num_evictable(held) for pool in self.pools)

    def open(self, hashes: Sequence[BlockHash], max_tokens: int) -> Holding:
        """A new holding with the leading full blocks that are held in *every* group.

        `hashes` name the request's full blocks; at most `max_tokens` tokens are taken (usually all but the
        last, since somebody must compute a token to have logits). It allocates none, so it can't run out.
        """
        held = hashes[: self._cached_blocks(hashes, max_tokens)]
        return Holding(self, tuple(pool.acquire(held) for pool in self.pools))

    def can_grow(self, holding: Holding, num_tokens: int) -> bool:
        """Whether `holding.grow(num_tokens)` would succeed now."""
        missing = self.num_blocks(num_tokens) - len(holding.tables[0])
        return all(missing <= pool.num_free for pool in self.pools)

    def drop_cache(self) -> None:
        """Forgets every block that only the prefix cache holds."""
        for pool in self.pools:
            pool.drop_cache()

    def audit(self) -> tuple[PoolAudit, ...]:
        """Counts by state, for each group."""
        return tuple(pool.audit() for pool in self.pools)

    def check_integrity(self, holdings: Iterable[Holding]) -> None:
        """Raises Internal unless the pools are sound and these holdings own exactly what is owned."""
        alive = list(holdings)
        for group, pool in enumerate(self.pools):
            pool.check_integrity()
            if Counter(block for holding in alive for block in holding.tables[group]) != pool.owned:
                raise Internal(f"group {group}: the live holdings do not add up to the owned blocks")

    def _cached_blocks(self, hashes: Sequence[BlockHash], max_tokens: int) -> int:
        leading = hashes[: max_tokens // self.block_tokens]
        return min(pool.lookup(leading) for pool in self.pools)


class Holding:
    """What one request owns. Made by `KvPools.open`, ended by `release`."""

    __slots__ = ("_num_published", "_pools", "_released", "num_cached_tokens", "tables")

    def __init__(self, pools: KvPools, tables: tuple[list[BlockId], ...]) -> None:
        self._pools = pools
        self._num_published = len(tables[0])
        self._released = False
        self.tables = tables
        """The block table of each group, as plans want them. They only ever get longer."""
        self.num_cached_tokens = len(tables[0]) * pools.block_tokens
        """Tokens whose KV was there when the holding was opened."""

    @property
    def num_tokens(self) -> int:
        """Positions that the tables cover."""
        return len(self.tables[0]) * self._pools.block_tokens

    def grow(self, num_tokens: int) -> None:
        """Makes the tables cover at least `num_tokens` positions, counted from the start of the request.

        Raises OutOfBlocks, and then no group has changed.
        """
        self._check_alive()
        if not self._pools.can_grow(self, num_tokens):
            raise OutOfBlocks(f"{num_tokens} tokens wanted, {self.num_tokens} held, "
                              f"{self._pools.free_tokens} more are free")  # fmt: skip
        missing = self._pools.num_blocks(num_tokens) - len(self.tables[0])
        if missing <= 0:
            return
        for table, pool in zip(self.tables, self._pools.pools, strict=True):
            table.extend(pool.allocate(missing))

    def publish_upto(self, num_tokens: int, hashes: Sequence[BlockHash]) -> None:
        """Names the full blocks of the first `num_tokens` positions, whose KV is now final in every group.

        `hashes[i]` names block i of the request. Raises Internal when tables or hashes do not reach that far.
        """
        self._check_alive()
        end = num_tokens // self._pools.block_tokens
        if num_tokens > self.num_tokens or end > len(hashes):
            raise Internal(f"publish_upto({num_tokens}) with {self.num_tokens} tokens, {len(hashes)} hashes")
        for table, pool in zip(self.tables, self._pools.pools, strict=True):
            for i in range(self._num_published, end):
                pool.publish(table[i], hashes[i])
        self._num_published = max(self._num_published, end)

    def release(self) -> None:
        """Gives every block back. Raises Internal the second time."""
        self._check_alive()
        self._released = True
        # New lists: a plan that still names the old ones sees them unchanged.
        tables, self.tables = self.tables, tuple([] for _ in self.tables)
        for table, pool in zip(tables, self._pools.pools, strict=True):
            pool.release(table)

    def _check_alive(self) -> None:
        if self._released:
            raise Internal("this holding was released")
