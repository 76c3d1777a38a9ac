"""Live requests as their clients see them: what came, what is still to be taken, and how fast it came.

A session is never pushed back for a slow client: what came is kept here, at most `max_tokens` of it, and
merged, so that a client that falls behind gets larger messages and not more of them. The server gives up one
that takes nothing for too long.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from diptych.domain.errors import DiptychError, Internal
from diptych.domain.ids import ChunkHash, RequestId, Tenant, WorkerId
from diptych.domain.sampling import SamplingParams
from diptych.v1 import common_pb2, decode_pb2
from services.router.decisions import Reason, WorkerRef

MERGED_TOKENS: Final = 1024
"""A message that waits for its client takes in what comes after it up to so many tokens."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that may be served: every field within its bounds, the input as ids, the seed settled."""

    tokens: tuple[int, ...]
    params: SamplingParams
    tenant: Tenant
    label: str
    priority: int
    cache_salt: str
    prefix: tuple[ChunkHash, ...] = ()
    """Hashes of the prompt's whole chunks, salted by tenant and `cache_salt`."""


@dataclass(slots=True)
class Piece:
    """What one message to the client says."""

    index: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: common_pb2.Finish | None = None


class LiveRequest:
    """One request between its worker and its client."""

    def __init__(
        self,
        request_id: RequestId,
        checked: CheckedRequest,
        now: float,
        *,
        output: Sequence[int] = (),
        num_earlier_moves: int = 0,
    ) -> None:
        """`output`: what its client has already, where it comes from another router."""
        self.request_id = request_id
        self.checked = checked
        self.output: list[int] = list(output)
        """Every token that came, taken by the client or not: what a request that moves starts from."""
        self.ref: WorkerRef | None = None
        """The worker that has it, or had it last."""
        self.told: WorkerRef | None = None
        """The worker that its client's latest resume token names."""
        self.fallbacks: Counter[Reason] = Counter()
        """Why it left each of the workers that it left, and its router."""
        self.error: DiptychError | None = None
        """What ended it, where that was the router's word and not a worker's."""
        self.ended = False
        """The last piece is there. Nothing is taken in after it."""
        self.times = Times(now)
        self._num_earlier_moves = num_earlier_moves
        self._pieces: deque[Piece] = deque()
        self._filled = asyncio.Event()

    @property
    def num_moves(self) -> int:
        """Decode workers that it left."""
        return self._num_earlier_moves + self.fallbacks.total() - self.fallbacks[Reason.ROUTER_LOST]

    @property
    def is_adopted(self) -> bool:
        """Whether it began at another router."""
        return bool(self.fallbacks[Reason.ROUTER_LOST])

    @property
    def worker_id(self) -> WorkerId:
        """Empty while none has had it."""
        return self.ref.worker_id if self.ref else WorkerId("")

    def push(self, delta: decode_pb2.Delta, now: float) -> None:
        """Takes in new tokens. Raises Internal, taking in nothing, for a gap, a repeat, or more than was
        asked for."""
        if self.ended or not (delta.tokens or delta.text):
            return
        expected = len(self.output)
        if delta.tokens and delta.index != expected:
            raise Internal(f"{self.worker_id} sent output {delta.index} where {expected} was next")
        if expected + len(delta.tokens) > self.checked.params.max_tokens:
            raise Internal(f"{self.worker_id} sent more than {self.checked.params.max_tokens} tokens")
        if delta.tokens:
            self.times.saw_tokens(now)
        self.output.extend(delta.tokens)
        last = self._pieces[-1] if self._pieces else None
        if last is None or len(last.tokens) + len(delta.tokens) > MERGED_TOKENS:
            last = Piece(expected)
            self._pieces.append(last)
        last.tokens.extend(delta.tokens)
        last.text += delta.text
        self._filled.set()

    def end(self, finish: common_pb2.Finish, now: float) -> bool:
        """Takes in the last word. False, and nothing changes, when it was said already."""
        if self.ended:
            return False
        self.ended = True
        self.times.ended_at = now
        if not self._pieces:
            self._pieces.append(Piece(len(self.output)))
        self._pieces[-1].finish = finish
        self._filled.set()
        return True

    async def next(self, within_s: float = 0.0) -> Piece:
        """What the client has not taken yet, in order; waits for it. The last piece has `finish`.

        Where nothing comes `within_s` seconds (0: that may take any time) the piece is empty.
        """
        while not self._pieces:
            self._filled.clear()
            try:
                async with asyncio.timeout(within_s or None):
                    await self._filled.wait()
            except TimeoutError:
                return Piece(len(self.output))
        return self._pieces.popleft()

    def ended_by(self, eos_ids: frozenset[int]) -> int | None:
        """The FinishReason that its output calls for; None while there is more to come.

        A worker says it with the last token. This is for one that was lost between the two.
        """
        params = self.checked.params
        if self.output and len(self.output) >= params.min_tokens:
            last = self.output[-1]
            if last in params.stop_token_ids or (last in eos_ids and not params.ignore_eos):
                return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if len(self.output) >= params.max_tokens else None


@dataclass(slots=True)
class Times:
    """When a request came, its first and its latest token, and its end; seconds of the router's clock."""

    arrived_at: float
    first_at: float | None = None
    latest_at: float = 0.0
    ended_at: float | None = None

    def saw_tokens(self, now: float) -> None:
        self.latest_at = now
        if self.first_at is None:
            self.first_at = now

    @property
    def ttft_s(self) -> float | None:
        """None where no token came."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    def tpot_s(self, num_tokens: int) -> float | None:
        """(last token - first) / (tokens - 1); None for fewer than two."""
        if self.first_at is None or num_tokens < 2:
            return None
        return (self.latest_at - self.first_at) / (num_tokens - 1)


class Recent:
    """Medians over the last requests that gave tokens."""

    def __init__(self, num_requests: int = 256) -> None:
        self._ttft_s: deque[float] = deque(maxlen=num_requests)
        self._tpot_s: deque[float] = deque(maxlen=num_requests)

    def add(self, times: Times, num_tokens: int) -> None:
        """Takes in one request that ended."""
        ttft_s, tpot_s = times.ttft_s, times.tpot_s(num_tokens)
        if ttft_s is not None:
            self._ttft_s.append(ttft_s)
        if tpot_s is not None:
            self._tpot_s.append(tpot_s)

    @property
    def ttft_p50_s(self) -> float:
        """0 while there is nothing to tell."""
        return _median(self._ttft_s)

    @property
    def tpot_p50_s(self) -> float:
        """0 while there is nothing to tell."""
        return _median(self._tpot_s)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
