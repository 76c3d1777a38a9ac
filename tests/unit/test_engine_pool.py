"""The pool's translation to and from the wire, byte by byte, and the null block."""

from __future__ import annotations

import pytest
import torch

from diptych.domain.errors import Unsupported
from diptych.domain.layout import GroupKind, KvDtype, KvLayout, LayerGroup
from diptych.engine.memory import allocate
from diptych.engine.pool import GroupPool, KvPool
from tests.support.runner_driver import table

pytestmark = pytest.mark.engine

GROUPS = (LayerGroup(GroupKind.FULL, 2, 3, 4), LayerGroup(GroupKind.SLIDING, 1, 1, 2, window=8))
LAYOUT = KvLayout("m", b"d", GROUPS, KvDtype.BFLOAT16)


def _filled() -> KvPool:
    """Two groups whose every element tells where it is."""
    pool = KvPool(LAYOUT, (5, 4), 4)
    counter = 1
    for group in pool.groups:
        for layer in (*group.keys, *group.values):
            rows = layer[: group.null_slot]
            rows.copy_(torch.arange(rows.numel()).view(rows.shape) % 251 + counter)
            counter += 1
    return pool


def test_the_wire_is_tokens_in_order_layer_by_layer_k_before_v() -> None:
    pool = _filled()
    tables = (*table([3, 0]), *table([1, 2]))
    out = allocate(LAYOUT.chunk_bytes(3))
    pool.pack(tables, 2, 3, out)
    expected = []
    for group, slots in zip(pool.groups, ([14, 15, 0], [6, 7, 8]), strict=True):
        for keys, values in zip(group.keys, group.values, strict=True):
            expected += [keys[slots], values[slots]]
    wire = torch.frombuffer(out.view(), dtype=torch.bfloat16)
    assert torch.equal(wire, torch.cat([part.flatten() for part in expected]))


def test_unpack_is_the_inverse_into_other_blocks() -> None:
    source, target = _filled(), KvPool(LAYOUT, (9, 7), 3)
    out, again = allocate(LAYOUT.chunk_bytes(5)), allocate(LAYOUT.chunk_bytes(5))
    digest = source.pack((*table([3, 0]), *table([1, 2])), 1, 5, out)
    tables = (*table([8, 2]), *table([0, 6]))
    target.unpack(out, tables, 1, 5)
    assert target.pack(tables, 1, 5, again) == digest
    assert bytes(again.view()) == bytes(out.view())
    written = sum(int((layer != 0).any(-1).any(-1).sum()) for group in target.groups for layer in group.keys)
    assert written == 5 * 3


def test_a_span_that_is_not_aligned() -> None:
    pool = _filled()
    tables = (*table([3, 0]), *table([1, 2]))
    size = LAYOUT.chunk_bytes(3)
    ring = allocate(size + 1)
    digest = pool.pack(tables, 0, 3, ring.slice(1, size))
    assert digest == pool.pack(tables, 0, 3, ring.slice(0, size))


def test_padding_reads_the_null_block_which_stays_zero() -> None:
    pool = _filled().groups[0]
    slots = pool.slots(table([3, 0])[0], 0, 6, 10)
    assert slots.tolist() == [12, 13, 14, 15, 0, 1, 20, 20, 20, 20]
    assert not pool.keys[0][pool.null_slot].any()


def test_groups_of_state_have_no_pool() -> None:
    group = LayerGroup(GroupKind.STATE, 2, state_bytes=64)
    with pytest.raises(Unsupported, match="fixed-size state"):
        GroupPool(group, KvDtype.FLOAT32, 4, 4, "cpu")
