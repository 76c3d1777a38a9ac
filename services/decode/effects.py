"""What the decode brain wants done: reads for the channel, and messages for the I/O process."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.domain.ids import Attempt, RequestId
from diptych.domain.plan import BlockTables
from diptych.domain.ports import RemotePiece
from diptych.domain.slots import Slot
from services.decode.messages import (
    AttemptEnded,
    BeginAnswer,
    ChunkDone,
    JobPosted,
    JobWithdrawn,
    TokensOut,
)


@dataclass(frozen=True, slots=True)
class ReadKey:
    """Names one read: `turn` tells a second try of a chunk from the first."""

    request_id: RequestId
    attempt: Attempt
    index: int
    turn: int


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read `piece` into the landing slot, which belongs to the channel until the read ends."""

    key: ReadKey
    piece: RemotePiece
    slot: Slot[ReadKey]
    digest: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Unpack:
    """Copy a landed chunk from its slot into the request's blocks: now, before the brain is asked again."""

    tables: BlockTables
    start: int
    num_tokens: int


@dataclass(slots=True)
class Effects:
    """Collected by the brain between two steps, carried out by the loop."""

    reads: list[StartRead] = field(default_factory=list)
    stop_reads: list[ReadKey] = field(default_factory=list)
    tokens: list[TokensOut] = field(default_factory=list)
    begins: list[BeginAnswer] = field(default_factory=list)
    posts: list[JobPosted] = field(default_factory=list)
    withdrawals: list[JobWithdrawn] = field(default_factory=list)
    chunks_done: list[ChunkDone] = field(default_factory=list)
    ended: list[AttemptEnded] = field(default_factory=list)
