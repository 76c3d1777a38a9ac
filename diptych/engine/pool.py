"""The paged KV pool, and its translation to and from the canonical wire layout.

**Theory of operation.** Each layer has one tensor of keys and one of values, `[slots, kv_heads,
head_size]`, where slot `block * block_tokens + i` is token `i` of a block. (One tensor a layer: a single
one over all layers made in-place writes slow and compilers wrong.) After the pool's own blocks comes the
*null block*, all zeros and never written: attention gathers it wherever a padded table has no token, so
that padding is finite and equal everywhere.

A chunk on the wire is tokens in order, layer by layer, K before V (`diptych.domain.layout`); packing is one
`index_select` for each layer's K and V straight into the chunk. Who owns which block is the scheduler's to
know.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.domain.errors import Unsupported
from diptych.domain.ids import BlockId
from diptych.domain.layout import GroupKind, KvDtype, KvLayout, LayerGroup
from diptych.domain.plan import BlockTables
from diptych.domain.ports import MemorySpan
from diptych.engine import memory
from diptych.engine.plan_check import check_tables

TORCH_DTYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.UINT8: torch.uint8,
}


class GroupPool:
    """Keys and values of one layer group."""

    def __init__(self, group: LayerGroup, dtype: KvDtype, num_blocks: int, block_tokens: int, device: str):
        if group.kind is GroupKind.STATE:
            raise Unsupported("layer groups with a fixed-size state have no paged pool")
        shape = ((num_blocks + 1) * block_tokens, group.num_kv_heads, group.head_size)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.keys, self.values = (
            [_zeros(shape, TORCH_DTYPES[dtype], device) for _ in range(group.num_layers)] for _ in range(2)
        )

    @property
    def null_slot(self) -> int:
        """A slot that always reads as zeros."""
        return self.num_blocks * self.block_tokens

    def slots(self, table: Sequence[BlockId], start: int, end: int, padded: int = 0) -> npt.NDArray[np.int64]:
        """Slots of positions `start` to `end`, and after them the null slot up to `padded` entries."""
        if end == start + 1 and padded <= 1:  # a decode's, as plain integers
            block, offset = divmod(start, self.block_tokens)
            return np.array([table[block] * self.block_tokens + offset], np.int64)
        positions = np.arange(start, end)
        blocks = np.asarray(table[: -(-end // self.block_tokens)], np.int64)
        found = blocks[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens
        missing = padded - len(found)
        return np.pad(found, (0, missing), constant_values=self.null_slot) if missing > 0 else found


class KvPool:
    """The pools of all layer groups. Host or device memory, as `device` says."""

    def __init__(self, layout: KvLayout, num_blocks: Sequence[int], block_tokens: int, device: str = "cpu"):
        self.layout = layout
        self.block_tokens = block_tokens
        self.num_blocks = tuple(num_blocks)
        self.device = device
        self.groups = tuple(
            GroupPool(group, layout.dtype, count, block_tokens, device)
            for group, count in zip(layout.groups, num_blocks, strict=True)
        )

    def pack(self, tables: BlockTables, start: int, num_tokens: int, out: MemorySpan) -> bytes:
        """See `Runner.pack`. Raises ValueError when `out` has not exactly the size of the chunk."""
        for layer, slots, wire in self._pieces(tables, start, num_tokens, out):
            torch.index_select(layer.view(len(layer), -1), 0, slots, out=wire)
        return self.digest(out)

    def unpack(self, data: MemorySpan, tables: BlockTables, start: int, num_tokens: int) -> None:
        """See `Runner.unpack`. Raises ValueError when `data` has not exactly the size of the chunk."""
        for layer, slots, wire in self._pieces(tables, start, num_tokens, data):
            layer.view(len(layer), -1).index_copy_(0, slots, wire)

    def digest(self, data: MemorySpan) -> bytes:
        """16-byte XXH3-128 of `data`; bytes on a device are copied to the host for it."""
        if data.device == "cpu":
            return memory.digest(data)
        copy = memory.allocate(data.num_bytes)
        _bytes_of(copy).copy_(_bytes_of(data))
        return memory.digest(copy)

    def _pieces(
        self, tables: BlockTables, start: int, num_tokens: int, span: MemorySpan
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """A layer's keys or values, the slots of the positions, and their part of the span, in wire order."""
        expected = self.layout.chunk_bytes(num_tokens)
        if span.num_bytes != expected:
            raise ValueError(f"{num_tokens} tokens are {expected} bytes, the span has {span.num_bytes}")
        check_tables(tables, start + num_tokens, self.num_blocks, self.block_tokens)
        wire = _bytes_of(span)
        offset = 0
        for group, pool, table in zip(self.layout.groups, self.groups, tables, strict=True):
            slots = torch.from_numpy(pool.slots(table, start, start + num_tokens)).to(self.device)
            num_bytes = group.token_bytes(self.layout.dtype) // (2 * group.num_layers) * num_tokens
            for keys, values in zip(pool.keys, pool.values, strict=True):
                for layer in (keys, values):
                    part = wire[offset : offset + num_bytes].view(layer.dtype).view(num_tokens, -1)
                    yield layer, slots, part
                    offset += num_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On the host: pages that come when touched, so that a large pool opens at once, and huge ones where
    there are such, so that reading blocks anywhere misses the TLB less."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_elements = math.prod(shape)
    pages = memory.anonymous_pages(num_elements * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=num_elements).view(shape)


def _bytes_of(span: MemorySpan) -> Tensor:
    """The span as uint8 [num_bytes], sharing its memory. On a device it must come from `memory.allocate`."""
    if span.device == "cpu":
        return torch.frombuffer(span.view(), dtype=torch.uint8)
    if not isinstance(span.owner, Tensor):
        raise TypeError(f"memory on {span.device} whose owner is no tensor")
    offset = span.address - span.owner.data_ptr()
    return span.owner[offset : offset + span.num_bytes]
