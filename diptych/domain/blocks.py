"""The blocks of one layer group's pool: who owns each, and what unowned ones still remember.

A block is in exactly one of three states:

            allocate                       release, last owner
    FREE ────────────▶ OWNED (refs ≥ 1) ──────────────────────▶ FREE     no hash: nothing to remember
      ▲                  ▲      │
      │            acquire      │ release, last owner, published
      │                  │      ▼
      └──────────────── CACHED (refs 0, has a hash)
        evicted by allocate (least recently released first), or drop_cache

`publish` names an owned block's contents by its hash. From then on the block is *immutable*, and that is what
allows more than one owner: `acquire` hands it to the next request that has the same prefix. A block without a
hash has one owner, who may write it. CACHED blocks count as free; they are taken when the truly free ones run
out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diptych.domain.errors import Internal, OurError
from diptych.domain.ids import BLOCK_TOKENS, BlockHash, BlockId


class OutOfBlocks(OurError):
    """The pool can't give that many blocks now. A scheduler waits or preempts; it never crosses a process."""

    retry = True


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """Blocks by state; `free + cached + owned == total` always."""

    free: int
    cached: int
    owned: int
    total: int


class BlockPool:
    """Gives out the blocks `0 … num_blocks - 1` of one layer group. Not thread-safe; it holds no memory."""

    def __init__(self, num_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks with tokens, not {num_blocks} of {block_tokens}")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]  # a stack: the last used is warm
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # oldest release first
        self._refs: dict[BlockId, int] = {}  # owned blocks only
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_of: dict[BlockHash, BlockId] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give now: free ones, and cached ones that it would evict."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> Mapping[BlockId, int]:
        """Number of owners of each owned block."""
        return self._refs

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Blocks with undefined contents and one owner each. Raises OutOfBlocks, and then changes nothing."""
        if num_blocks > self.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        self._refs.update(dict.fromkeys(blocks, 1))
        return blocks

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are held, owned or cached. Touches nothing."""
        return next((i for i, name in enumerate(hashes) if name not in self._block_of), len(hashes))

    def num_evictable(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these held hashes lie in cached blocks: what `acquire` would take from `num_free`."""
        return sum(self._block_of.get(name) in self._cached for name in hashes)

    def acquire(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """One more owner for the block of each hash. Raises Internal (nothing changed) if one is absent."""
        held = self.lookup(hashes)
        if held < len(hashes):
            raise Internal(f"acquire: no block holds {hashes[held].hex()}")
        blocks = [self._block_of[name] for name in hashes]
        for block in blocks:
            self._cached.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1
        return blocks

    def publish(self, block: BlockId, name: BlockHash) -> None:
        """Declares an owned block's contents final and names them.

        Where another block already has this name, that one keeps it and this one stays private to its owner.
        Raises Internal when the block is not owned or already has another name.
        """
        if block not in self._refs:
            raise Internal(f"publish: block {block} has no owner")
        if self._hash_of.get(block, name) != name:
            raise Internal(f"publish: block {block} already has another hash")
        if name not in self._block_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Ends one ownership of each block, given in table order.

        Works from the tail, so that of one request's cached blocks the tail is evicted before the head
        without which it can't be found. Raises Internal on a double free.
        """
        for block in reversed(blocks):
            refs = self._refs.get(block, 0)
            if refs == 0:
                raise Internal(f"release: block {block} has no owner")
            if refs > 1:
                self._refs[block] = refs - 1
                continue
            del self._refs[block]
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def drop_cache(self) -> None:
        """Forgets every cached block. Owned blocks keep their hashes, and are cached again when released."""
        while self._cached:
            self._free.append(self._evict())

    def audit(self) -> PoolAudit:
        """Counts by state."""
        return PoolAudit(len(self._free), len(self._cached), len(self._refs), self.num_blocks)

    def check_integrity(self) -> None:
        """Raises Internal unless each block is in one state, and hashes and blocks mirror each other."""
        everywhere = sorted([*self._free, *self._cached, *self._refs])
        if everywhere != list(range(self.num_blocks)):
            raise Internal(f"blocks are not in exactly one state each: {self.audit()}")
        if any(refs < 1 for refs in self._refs.values()):
            raise Internal("an owned block has no owner")
        if any(refs > 1 and block not in self._hash_of for block, refs in self._refs.items()):
            raise Internal("a block that may still be written has two owners")
        if {block: name for name, block in self._block_of.items()} != self._hash_of:
            raise Internal("hashes and blocks do not mirror each other")
        if not self._cached.keys() <= self._hash_of.keys() or not self._hash_of.keys().isdisjoint(self._free):
            raise Internal("a cached block has no hash, or a free one has")

    def _evict(self) -> BlockId:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block
