"""Names of things, as types, so that one cannot be passed for another."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Minted by the router; unique across the cluster. A client's own id is only a label."""

WorkerId = NewType("WorkerId", str)
"""Stable over restarts of the same worker; `Epoch` tells the restarts apart."""

Epoch = NewType("Epoch", int)
"""63 random bits drawn once per process start. A reference with another epoch is stale and changes
nothing."""

Attempt = NewType("Attempt", int)
"""Counts the prefills of one request, from 1. Minted by the decode worker's answer to `Begin`, nowhere
else."""

BlockId = NewType("BlockId", int)
"""Index of a block within one layer group's pool."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: identity of one full block of KV and of everything before it."""

ChunkHash = NewType("ChunkHash", bytes)
"""16 bytes: the hash of a chunk's last block, which covers the whole prefix."""

Cell = NewType("Cell", str)
"""Prefill and decode workers that are close on the network and share one prefill queue."""

Tenant = NewType("Tenant", str)

BLOCK_TOKENS = 16
"""Tokens of KV in one block of the default pool."""

CHUNK_TOKENS = 256
"""Tokens in one chunk: the unit of chunked prefill, of the wire, of the directory and of the outer tiers."""
