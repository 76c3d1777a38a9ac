"""One attempt's KV on its way in. Pure bookkeeping: which chunk was announced, is being read, has landed.

    announced ─▶ waiting (for a slot) ─▶ reading ─▶ landed          complete: manifest and every chunk landed
                     ▲                      │
                     └──── wrong or lost, once ┘                    the second time ends the attempt

Chunks are announced in order and without gaps from the first token that the decode worker lacks; anything
else is refused, a repeat of a known one is ignored.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from diptych.domain.errors import LayoutMismatch, TransferFailed
from diptych.domain.fallbacks import Fallback
from diptych.domain.ids import CHUNK_TOKENS, Attempt
from diptych.domain.layout import KvLayout
from diptych.domain.ports import Region
from services.decode.channels import Choice
from services.decode.messages import ChunkReady, ManifestReceived


@dataclass(slots=True)
class Landing:
    """One attempt, as far as it has come."""

    attempt: Attempt
    prefill_worker: str
    num_held: int
    """Tokens whose KV was here before; the first chunk starts after them."""
    num_tokens: int
    begun_at: float
    heard_at: float
    slow: frozenset[str] = frozenset()
    """Channels over which its owner is too far away."""
    chunks: list[ChunkReady] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    started: dict[int, float] = field(default_factory=dict)
    """When the read of each chunk began: those under way, and those that landed."""
    landed: set[int] = field(default_factory=set)
    retried: set[int] = field(default_factory=set)
    regions: dict[int, Region] = field(default_factory=dict)
    """Over which channel each chunk was read, the last time."""
    fallbacks: set[Fallback] = field(default_factory=set)
    """Why that was not the best one."""
    manifest: ManifestReceived | None = None
    manifest_at: float = 0.0
    handoff_s: float = 0.0

    def read_over(self, index: int, choice: Choice) -> None:
        """A read of a chunk starts."""
        self.regions[index] = choice.piece.region
        if choice.fallback is not None:
            self.fallbacks.add(choice.fallback)

    @property
    def complete(self) -> bool:
        return self.manifest is not None and len(self.landed) == self.manifest.num_chunks

    @property
    def num_announced(self) -> int:
        """Position after the last announced token."""
        return self.chunks[-1].start + self.chunks[-1].num_tokens if self.chunks else self.num_held

    @property
    def num_contiguous(self) -> int:
        """Position up to which the KV is here without a gap."""
        end = self.num_held
        for chunk in self.chunks:
            if chunk.index not in self.landed:
                break
            end = chunk.start + chunk.num_tokens
        return end

    @property
    def kv_bytes(self) -> int:
        return sum(self.chunks[index].piece.num_bytes for index in self.landed)

    def accept(self, chunk: ChunkReady, layout: KvLayout) -> bool:
        """Takes an announcement. False for a repeat. Raises TransferFailed when it does not fit."""
        if chunk.index < len(self.chunks):
            return False
        end = chunk.start + chunk.num_tokens
        if chunk.index > len(self.chunks) or chunk.start != self.num_announced:
            raise TransferFailed(f"chunk {chunk.index} at {chunk.start}: {self.num_announced} comes next")
        if not 0 < chunk.num_tokens <= CHUNK_TOKENS or end > self.num_tokens:
            raise TransferFailed(f"chunk {chunk.index} ends at {end} of {self.num_tokens} tokens")
        if chunk.piece.num_bytes != layout.chunk_bytes(chunk.num_tokens):
            raise TransferFailed(f"chunk {chunk.index} has {chunk.piece.num_bytes} bytes")
        self.chunks.append(chunk)
        self.waiting.append(chunk.index)
        return True

    def conclude(self, manifest: ManifestReceived, fingerprint: str, now: float) -> None:
        """Takes the manifest. Raises LayoutMismatch or TransferFailed when it is not what was announced."""
        if manifest.fingerprint != fingerprint:
            raise LayoutMismatch(f"the manifest is of layout {manifest.fingerprint}, ours is {fingerprint}")
        if manifest.num_chunks != len(self.chunks) or self.num_announced != self.num_tokens:
            raise TransferFailed(f"the manifest closes {manifest.num_chunks} chunks, {len(self.chunks)} came "
                                 f"with {self.num_announced} of {self.num_tokens} tokens")  # fmt: skip
        if manifest.num_tokens != self.num_tokens:
            raise TransferFailed(f"the manifest has {manifest.num_tokens} of {self.num_tokens} tokens")
        self.manifest = manifest
        self.manifest_at = now
