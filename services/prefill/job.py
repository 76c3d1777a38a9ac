"""One attempt as the prefill brain keeps it."""

from __future__ import annotations

from collections import Counter, deque

from diptych.domain.hashing import block_hashes
from diptych.domain.holding import Holding
from diptych.domain.ids import CHUNK_TOKENS, BlockHash
from diptych.domain.lifecycle import PrefillEvent, PrefillState, advance_prefill
from diptych.domain.order import place
from services.prefill.messages import Begun, BorrowedChunk


class PrefillJob:
    """A live attempt. `holding` owns its blocks from its start until its last chunk is packed."""

    __slots__ = (
        "banned", "borrowed", "computed_at", "fallbacks", "first_token", "hashes", "holding", "key", "lent",
        "num_announced", "num_borrowed", "num_cached", "num_computed", "num_held", "num_packed", "params",
        "place", "reading", "started_at", "state", "tokens",
    )  # fmt: skip

    def __init__(self, message: Begun, arrival: int, now: float, block_tokens: int) -> None:
        self.key = message.key
        self.tokens = list(message.tokens)
        self.params = message.params
        self.banned = tuple(message.banned)
        self.num_held = message.num_held
        self.place = place(message.priority, now, arrival)
        self.hashes: list[BlockHash] = block_hashes(message.cache_root, self.tokens, block_tokens)
        self.borrowed: deque[BorrowedChunk] = deque(message.borrowed)
        self.lent = bool(message.borrowed)
        """Whether the lenders still wait to hear that we are done."""
        self.reading = False
        """Whether a borrowed chunk is being read."""
        self.num_borrowed = 0
        self.fallbacks: Counter[str] = Counter([message.fallback] if message.fallback else [])
        self.state = PrefillState.QUEUED
        self.holding: Holding | None = None
        self.num_computed = 0
        self.num_cached = 0
        self.num_announced = message.num_held
        """Position up to which chunks were packed and announced."""
        self.num_packed = 0
        self.first_token: int | None = None
        self.started_at = 0.0
        self.computed_at = 0.0

    @property
    def num_left(self) -> int:
        """Prompt tokens without KV."""
        return len(self.tokens) - self.num_computed

    @property
    def borrowing(self) -> bool:
        return self.reading or bool(self.borrowed)

    @property
    def next_chunk_end(self) -> int:
        """Where the next chunk to be announced ends."""
        boundary = (self.num_announced // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        return min(boundary, len(self.tokens))

    @property
    def all_packed(self) -> bool:
        return self.num_announced == len(self.tokens)

    def advance(self, event: PrefillEvent) -> None:
        self.state = advance_prefill(self.state, event)

    def extends(self, chunk: BorrowedChunk) -> bool:
        """Whether a borrowed chunk brings more than is here, without a gap, and leaves a token to run."""
        start, end = chunk.index * CHUNK_TOKENS, (chunk.index + 1) * CHUNK_TOKENS
        return start <= self.num_computed < end < len(self.tokens)

    def next_compute(self, budget: int) -> list[int]:
        """The next prompt tokens to run: not past a chunk's end, so that it can be announced at once."""
        start = self.num_computed
        boundary = (start // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        return self.tokens[start : min(start + budget, boundary)]
