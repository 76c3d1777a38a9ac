"""What KV looks like: layer groups, dtypes, the canonical wire layout of a chunk, and its fingerprint.

A model's layers fall into *groups* that share a shape and a rule of what to keep. Each group has its own
pool and its own block table. Llama has one group, Gemma 3 two, a state-space model a group of fixed-size
state.

The canonical wire layout of a chunk of `n` tokens is, little-endian and without padding:

    for each group, in order
        FULL, SLIDING   for each layer: K [n, kv_heads, head_size], then V [n, kv_heads, head_size]
        STATE           for each layer: the state after the chunk's last token, `state_bytes` long

It knows nothing of pools, block sizes or kernels, so that the two sides of a hop may differ in all of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

from diptych.domain.ids import CHUNK_TOKENS

WIRE_VERSION = 1
"""Compared before anything else is decoded. Raise it when the meaning of any byte of a chunk changes."""


class GroupKind(Enum):
    """What a group's layers keep: every token, a window of them, or a state of fixed size."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


class KvDtype(Enum):
    """Element type of keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "bfloat16": 2, "uint8": 1}[self.value]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a KV shape and a rule of what to keep.

    `window` is the number of tokens a SLIDING layer looks back; `state_bytes` the size of one STATE layer.
    """

    kind: GroupKind
    num_layers: int
    num_kv_heads: int = 0
    head_size: int = 0
    window: int = 0
    state_bytes: int = 0

    def token_bytes(self, dtype: KvDtype) -> int:
        """Bytes that one more token adds to the wire form of this group; 0 for STATE."""
        if self.kind is GroupKind.STATE:
            return 0
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV of one model in one format: all that two workers must agree upon before a hop."""

    model: str
    model_digest: bytes
    groups: tuple[LayerGroup, ...]
    dtype: KvDtype
    numerics: str = "plain"
    """Producer numerics that change KV values beyond rounding, such as a lossy weight format or codec."""

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token over all groups."""
        return sum(group.token_bytes(self.dtype) for group in self.groups)

    def chunk_bytes(self, num_tokens: int = CHUNK_TOKENS) -> int:
        """Bytes of a chunk of `num_tokens` in the canonical wire layout."""
        state = sum(g.num_layers * g.state_bytes for g in self.groups if g.kind is GroupKind.STATE)
        return self.token_bytes * num_tokens + state

    @property
    def fingerprint(self) -> str:
        """32 hex digits that differ whenever two layouts can't exchange chunks."""
        groups = [(g.kind.value, g.num_layers, g.num_kv_heads, g.head_size, g.window, g.state_bytes)
                  for g in self.groups]  # fmt: skip
        parts = (WIRE_VERSION, CHUNK_TOKENS, self.model_digest.hex(), self.dtype.value, self.numerics, groups)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
