"""Which decode worker lately had which prefix: a hint about what its prefix cache holds, and no more than
that.

A prefix is known by the hashes of its whole chunks, salted by tenant and `cache_salt`, so that nobody's
request goes by what another tenant sent. The memory is bounded; what was not seen for longest is forgotten
first. A worker may have evicted what we remember, or have been started anew: then the request computes what
it must, wherever it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from diptych.domain.ids import ChunkHash
from services.router.decisions import WorkerRef

MAX_CHUNKS: Final = 1 << 16
"""Remembered at most: 16 M tokens, some 10 MB."""


class PrefixHomes:
    """The last worker of each chunk seen."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._homes: OrderedDict[ChunkHash, WorkerRef] = OrderedDict()

    def remember(self, prefix: Sequence[ChunkHash], ref: WorkerRef) -> None:
        """A request with these chunks, first to last, was given to `ref`."""
        for chunk in reversed(prefix):  # so that a prefix is forgotten from its tail
            self._homes[chunk] = ref
            self._homes.move_to_end(chunk)
        while len(self._homes) > self._max_chunks:
            self._homes.popitem(last=False)

    def num_held(self, prefix: Sequence[ChunkHash], ref: WorkerRef) -> int:
        """Leading chunks of `prefix` that `ref` may hold."""
        return next((i for i, chunk in enumerate(prefix) if self._homes.get(chunk) != ref), len(prefix))

    def __len__(self) -> int:
        return len(self._homes)
