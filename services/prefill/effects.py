"""What the prefill brain wants done: packs and reads for the loop, and messages for the I/O process."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.domain.plan import BlockTables
from diptych.domain.slots import Slot
from services.prefill.messages import AttemptKey, AttemptOver, BorrowedChunk, BorrowingOver, ManifestReady
from services.prefill.sources import SourceKey


@dataclass(frozen=True, slots=True)
class Pack:
    """Pack these positions into the slot, then say `packed` with the digest."""

    key: AttemptKey
    index: int
    start: int
    num_tokens: int
    tables: BlockTables
    slot: Slot[SourceKey]
    chunk_hash: bytes
    parent_hash: bytes


@dataclass(frozen=True, slots=True)
class Borrow:
    """Read this chunk into the slot, then say `borrow_read`."""

    key: AttemptKey
    chunk: BorrowedChunk
    slot: Slot[AttemptKey]


@dataclass(slots=True)
class Effects:
    """Collected by the brain between two turns, sent by the loop."""

    manifests: list[ManifestReady] = field(default_factory=list)
    over: list[AttemptOver] = field(default_factory=list)
    borrowing_over: list[BorrowingOver] = field(default_factory=list)
