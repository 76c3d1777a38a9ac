"""What the two processes of a prefill worker tell each other: one batch each way a step, as MessagePack."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from diptych.domain.engine_report import EngineLoad, EngineReady, FailureInfo
from diptych.domain.ids import Attempt, BlockHash, Epoch, RequestId
from diptych.domain.ports import Region, RemotePiece
from diptych.domain.sampling import SamplingParams

NO_EPOCH = Epoch(0)


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Names one prefill of one request. Nothing of an earlier attempt is ever mistaken for it: each start of
    a decode worker counts its own attempts, and a request that moves keeps its id."""

    request_id: RequestId
    attempt: Attempt
    decode_epoch: Epoch = NO_EPOCH


@dataclass(frozen=True, slots=True)
class BorrowedChunk:
    """A whole chunk that another process lends, from the request's start: chunk `index` of 256 tokens."""

    index: int
    piece: RemotePiece
    digest: bytes


@dataclass(frozen=True, slots=True)
class Begun:
    """A job with everything the decode worker's answer to `Begin` brought."""

    key: AttemptKey
    tokens: list[int]
    params: SamplingParams
    banned: list[int]
    num_held: int
    cache_root: BlockHash
    priority: int
    borrowed: list[BorrowedChunk] = field(default_factory=list)
    fallback: str = ""
    """Why not more of it was borrowed, where more was said to be there."""


@dataclass(frozen=True, slots=True)
class Released:
    """`reader` ("decode" or "cache") has ended its read of a chunk."""

    key: AttemptKey
    index: int
    reader: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The decode worker wants no more of this attempt, or can't be reached."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class PrefillInbox:
    """What the engine is told in one turn."""

    begins: list[Begun] = field(default_factory=list)
    released: list[Released] = field(default_factory=list)
    stops: list[Stopped] = field(default_factory=list)
    drop_cache: list[bool] = field(default_factory=list)
    """Not empty: forget cached prefixes."""
    looks: list[int] = field(default_factory=list)
    """Questions of how the engine is now; the next load answers the newest."""


@dataclass(frozen=True, slots=True)
class ChunkAnnounced:
    """A chunk that lies readable in the send ring. `chunk_hash` is empty unless it is a whole one, which the
    cache service is then offered."""

    key: AttemptKey
    index: int
    start: int
    num_tokens: int
    piece: RemotePiece
    digest: bytes
    chunk_hash: bytes = b""
    parent_hash: bytes = b""
    """Of the chunk before it; empty for the first."""
    others: list[Region] = field(default_factory=list)
    """The same memory over our other channels."""

    def piece_over(self, kinds: Collection[str]) -> RemotePiece | None:
        """The piece for a reader that speaks `kinds`; None when it speaks none of ours."""
        for region in (self.piece.region, *self.others):
            if region.kind in kinds:
                return RemotePiece(region, self.piece.offset, self.piece.num_bytes)
        return None


@dataclass(frozen=True, slots=True)
class ManifestReady:
    """Every chunk of an attempt was announced, and its first token drawn."""

    key: AttemptKey
    num_chunks: int
    num_tokens: int
    fingerprint: str
    first_token: int
    prefill_s: float
    num_cached_tokens: int
    num_borrowed_tokens: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    computed_at: float = 0.0
    """When the last chunk was, by this machine's monotonic clock."""


@dataclass(frozen=True, slots=True)
class AttemptOver:
    """Nothing of the attempt is left but chunks that the cache still reads. `failure` where it was ours."""

    key: AttemptKey
    failure: FailureInfo | None = None


@dataclass(frozen=True, slots=True)
class BorrowingOver:
    """No borrowed chunk of this attempt is needed any more."""

    key: AttemptKey
    num_borrowed: int


@dataclass(frozen=True, slots=True)
class PrefillOutbox:
    """What the engine says after one turn."""

    ready: EngineReady | None = None
    chunks: list[ChunkAnnounced] = field(default_factory=list)
    manifests: list[ManifestReady] = field(default_factory=list)
    over: list[AttemptOver] = field(default_factory=list)
    borrowing_over: list[BorrowingOver] = field(default_factory=list)
    load: EngineLoad | None = None
