"""Identity of cached KV: a chain of 128-bit hashes, the same in every process and on every machine.

    root = H(salt)      h[0] = H(root, tokens of block 0)      h[i] = H(h[i - 1], tokens of block i)

A block's hash therefore covers every token before it and everything in the salt: tenant, weights, tokenizer,
KV format and producer numerics. Two requests share KV only when all of these are equal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from diptych.domain.ids import BLOCK_TOKENS, CHUNK_TOKENS, BlockHash, ChunkHash
from diptych.domain.layout import KvLayout


def cache_root(layout: KvLayout, tokenizer_digest: bytes, tenant: str, cache_salt: str) -> BlockHash:
    """The hash before the first block. Parts are length-prefixed, so that no two lists of parts collide."""
    parts = (layout.fingerprint.encode(), tokenizer_digest, tenant.encode(), cache_salt.encode())
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return BlockHash(digest.digest())


def extend_chain(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Hash of the block that holds `tokens` and follows `parent`."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return BlockHash(hashlib.blake2b(parent + packed, digest_size=16).digest())


def block_hashes(root: BlockHash, tokens: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens`; a part of a block at the end has none."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = extend_chain(parent, tokens[start : start + block_tokens])
        hashes.append(parent)
    return hashes


def chunk_hashes(root: BlockHash, tokens: Sequence[int]) -> list[ChunkHash]:
    """Hashes of the whole chunks of `tokens`. They never depend on a worker's pool: blocks of 16 always."""
    blocks_per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
    hashes = block_hashes(root, tokens, BLOCK_TOKENS)
    return [ChunkHash(hashes[i]) for i in range(blocks_per_chunk - 1, len(hashes), blocks_per_chunk)]
