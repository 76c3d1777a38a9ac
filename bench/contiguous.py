"""KV memory as it was before paging: one run of consecutive blocks a request, for the most it may ever need.

Behind the interface of `KvPools`, so that the very scheduler of a decode worker runs on it: only the memory
differs. First fit over the free runs; a freed run joins its neighbours; nothing is shared or cached. Two
kinds of memory are lost: what a request has reserved and not filled (internal fragmentation), and free runs
that are too short for whoever waits (external).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diptych.domain.blocks import BlockPool, OutOfBlocks
from diptych.domain.holding import Holding, KvPools
from diptych.domain.ids import BlockHash, BlockId


class ContiguousPools(KvPools):
    """One layer group. `maximum` tells from a request's tokens at admission how many it may come to have."""

    def __init__(self, num_blocks: int, block_tokens: int, maximum: Callable[[int], int]) -> None:
        super().__init__([BlockPool(num_blocks, block_tokens)])
        self._maximum = maximum
        self._free: list[tuple[int, int]] = [(0, num_blocks)]
        """(first, length) of free runs, by place."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody has reserved."""
        return sum(length for _, length in self._free)

    def cached_tokens(self, hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Nothing is ever cached."""
        return 0

    def can_open(self, hashes: Sequence[BlockHash], max_tokens: int, num_tokens: int) -> bool:
        """Whether some free run holds the maximum of a request that needs `num_tokens` now."""
        return self._fit(self._reserved(num_tokens)) is not None

    def open(self, hashes: Sequence[BlockHash], max_tokens: int) -> Holding:
        """An empty holding; its first `grow` reserves."""
        return Reservation(self)

    def can_grow(self, holding: Holding, num_tokens: int) -> bool:
        """Whether the reservation reaches that far. It never becomes longer."""
        return num_tokens <= holding.num_tokens

    def drop_cache(self) -> None:
        """There is none."""

    def reserve(self, num_tokens: int) -> range:
        """The blocks for a request's maximum. Raises OutOfBlocks when no free run is long enough."""
        length = self._reserved(num_tokens)
        index = self._fit(length)
        if index is None:
            raise OutOfBlocks(f"no run of {length} blocks, {self.num_free_blocks} are free")
        first, free = self._free[index]
        self._free[index : index + 1] = [(first + length, free - length)] if free > length else []
        return range(first, first + length)

    def give_back(self, run: range) -> None:
        """Frees a reservation and joins it to its free neighbours."""
        joined: list[tuple[int, int]] = []
        for first, length in sorted([*self._free, (run.start, len(run))]):
            if joined and sum(joined[-1]) == first:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((first, length))
        self._free = joined

    def _reserved(self, num_tokens: int) -> int:
        return self.num_blocks(max(num_tokens, self._maximum(num_tokens)))

    def _fit(self, length: int) -> int | None:
        return next((i for i, (_, free) in enumerate(self._free) if free >= length), None)


class Reservation(Holding):
    """A request's run of blocks. Made by `ContiguousPools.open`."""

    __slots__ = ("_memory", "_run")

    def __init__(self, memory: ContiguousPools) -> None:
        super().__init__(memory, ([],))
        self._memory = memory
        self._run: range | None = None

    def grow(self, num_tokens: int) -> None:
        """The first time: reserves the maximum. Raises OutOfBlocks when that is not there, or not enough."""
        if self._run is None:
            self._run = self._memory.reserve(num_tokens)
            self.tables = ([BlockId(block) for block in self._run],)
        if num_tokens > self.num_tokens:
            raise OutOfBlocks(f"{num_tokens} tokens wanted, {self.num_tokens} reserved")

    def publish_upto(self, num_tokens: int, hashes: Sequence[BlockHash]) -> None:
        """Nothing is shared."""

    def release(self) -> None:
        """Gives the run back."""
        if self._run is not None:
            self._memory.give_back(self._run)
            self._run = None
        self.tables = ([],)
