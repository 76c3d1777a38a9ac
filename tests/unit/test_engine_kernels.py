"""Compiled kernels against torch in fp32, on the same bf16 memory."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

pytest.importorskip("numba")

from diptych.engine.kernels.amx import can_multiply
from diptych.engine.kernels.paged_attention import PagedAttention, paged_attention
from diptych.engine.kernels.rows import (
    add_norm,
    add_norm_spread,
    gate,
    gate_spread,
    norm,
    norm_spread,
    rotate_and_keep,
)
from diptych.engine.kernels.tile_parts import can_tile
from diptych.engine.kernels.tiled_decode import tiled_decode
from diptych.engine.kernels.tiled_prefill import tiled_prefill
from diptych.engine.rope import rotate

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

SHAPES = [(9, 3, 64), (4, 4, 16), (4, 1, 32)]
"""Heads, KV heads and head size."""
BLOCK_TOKENS = (1, 7, 16, 32)
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 160]
compiled = functools.cache(paged_attention)


@dataclass(frozen=True)
class Pool:
    """A pool with a step's queries: tables are disjoint, in random order; what no table names is NaN."""

    tables: np.ndarray
    ends: np.ndarray
    queries: torch.Tensor  # [rows, heads, head_size], of rows that hold more than them
    keys: torch.Tensor
    values: torch.Tensor


def _pool(shape: tuple[int, int, int], block_tokens: int, ends: list[int], seed: int) -> Pool:
    num_heads, num_kv_heads, head_size = shape
    generator = torch.Generator().manual_seed(seed)
    widest = max(-(-end // block_tokens) for end in ends)
    blocks = torch.randperm(len(ends) * widest + 3, generator=generator)[: len(ends) * widest]
    tables = blocks.view(len(ends), widest).numpy()
    keys, values = (
        torch.full(((len(ends) * widest + 3) * block_tokens, num_kv_heads, head_size), torch.nan).bfloat16()
        for _ in range(2)
    )
    for table, end in zip(tables, ends, strict=True):
        for layer in (keys, values):
            layer[_slots(table, end, block_tokens)] = torch.randn(
                end, num_kv_heads, head_size, generator=generator
            ).bfloat16()
    rows = torch.randn(len(ends), num_heads + 5, head_size, generator=generator).bfloat16() * 2
    return Pool(tables, np.array(ends), rows[:, :num_heads], keys, values)


def _slots(table: np.ndarray, end: int, block_tokens: int) -> torch.Tensor:
    positions = np.arange(end)
    return torch.from_numpy(table[positions // block_tokens] * block_tokens + positions % block_tokens)


def _attended(kernel: PagedAttention, pool: Pool) -> torch.Tensor:
    out = torch.full(pool.queries.shape, torch.nan, dtype=torch.bfloat16)
    kernel(
        pool.queries.data_ptr(), pool.queries.stride(0), pool.keys.data_ptr(), pool.values.data_ptr(),
        out.data_ptr(), pool.tables, pool.ends,
    )  # fmt: skip
    return out


def _expected(pool: Pool, block_tokens: int) -> torch.Tensor:
    rows = []
    for table, end, query in zip(pool.tables, pool.ends, pool.queries, strict=True):
        slots = _slots(table, end, block_tokens)
        context = (layer[slots].float().transpose(0, 1)[None] for layer in (pool.keys, pool.values))
        rows.append(
            functional.scaled_dot_product_attention(query.float()[None, :, None], *context, enable_gqa=True)
        )
    return torch.cat(rows)[:, :, 0]


@given(
    shape=st.sampled_from(SHAPES),
    block_tokens=st.sampled_from(BLOCK_TOKENS),
    ends=st.lists(st.sampled_from(EDGES) | st.integers(1, 200), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 30),
)
@example(shape=SHAPES[0], block_tokens=16, ends=[1], seed=0)
@settings(max_examples=60, deadline=None)
def test_paged_attention(shape: tuple[int, int, int], block_tokens: int, ends: list[int], seed: int) -> None:
    pool = _pool(shape, block_tokens, ends, seed)
    found = _attended(compiled(*shape, block_tokens, 1), pool)
    torch.testing.assert_close(found.float(), _expected(pool, block_tokens), atol=1e-5, rtol=2**-8)


needs_amx = pytest.mark.skipif(not can_multiply(), reason="this CPU has no AMX: the kernels are not used")
TILED_SHAPES = [(9, 3, 64), (4, 4, 32), (16, 1, 32)]
tiled = functools.cache(tiled_decode)
tiled_rows = functools.cache(tiled_prefill)


@needs_amx
@given(
    shape=st.sampled_from(TILED_SHAPES),
    block_tokens=st.sampled_from([16, 32]),
    ends=st.lists(st.sampled_from([*EDGES, 255, 256, 257]) | st.integers(1, 600), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=40, deadline=None)
def test_tiled_decode(shape: tuple[int, int, int], block_tokens: int, ends: list[int], seed: int) -> None:
    pool = _pool(shape, block_tokens, ends, seed)
    found = _attended(tiled(*shape, block_tokens, 1), pool)
    # Queries and values are exact; weights are rounded to bf16, in proportion to what they weigh.
    torch.testing.assert_close(found.float(), _expected(pool, block_tokens), atol=2e-2, rtol=2**-7)


@needs_amx
@given(
    shape=st.sampled_from(TILED_SHAPES),
    block_tokens=st.sampled_from([16, 32]),
    start=st.sampled_from([0, 1, 15, 16, 255, 256, 300]),
    num_rows=st.sampled_from([2, 16, 31, 32, 33]) | st.integers(2, 300),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1 << 30),
)
@example(shape=(4, 4, 32), block_tokens=32, start=0, num_rows=248, threads=2, seed=0)
@settings(max_examples=40, deadline=None)
def test_tiled_prefill(
    shape: tuple[int, int, int], block_tokens: int, start: int, num_rows: int, threads: int, seed: int
) -> None:
    num_heads, _, head_size = shape
    assert can_tile(head_size, block_tokens)
    end = start + num_rows
    pool = _pool(shape, block_tokens, [end], seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, num_heads + 5, head_size, generator=generator).bfloat16()
    out = torch.full((num_rows, num_heads, head_size), torch.nan, dtype=torch.bfloat16)
    tiled_rows(*shape, block_tokens, threads)(
        rows.data_ptr(), rows.stride(0), pool.keys.data_ptr(), pool.values.data_ptr(), out.data_ptr(),
        num_rows, start, pool.tables[0],
    )  # fmt: skip
    slots = _slots(pool.tables[0], end, block_tokens)
    queries, keys, values = (
        part.float().transpose(0, 1)[None]
        for part in (rows[:, :num_heads], pool.keys[slots], pool.values[slots])
    )
    mask = torch.arange(end) <= torch.arange(start, end)[:, None]
    expected = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out.float(), expected[0].transpose(0, 1), atol=2e-2, rtol=2**-7)


def test_two_threads_compute_what_one_does() -> None:
    pool = _pool(SHAPES[0], 16, [33, 1, 200, 16], 4)
    one, two = (_attended(compiled(*SHAPES[0], 16, threads), pool) for threads in (1, 2))
    assert torch.equal(one, two)


@needs_amx
def test_tiles_shared_by_two_threads_are_those_of_one() -> None:
    for ends in ([300], [33, 1, 200, 16]):
        pool = _pool(SHAPES[0], 16, ends, 4)
        one, two = (_attended(tiled(*SHAPES[0], 16, threads), pool) for threads in (1, 2))
        assert torch.equal(one, two)


def test_high_scores_neither_overflow_nor_vanish() -> None:
    """Scores of some hundreds: their exponentials are beyond fp32 unless the highest is taken off first."""
    pool = _pool(SHAPES[0], 16, [100], 1)
    pool.queries.mul_(100)
    found = _attended(compiled(*SHAPES[0], 16, 1), pool)
    torch.testing.assert_close(found.float(), _expected(pool, 16), atol=1e-4, rtol=0.02)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [16, 576])
def test_norms(rows: int, width: int) -> None:
    hidden, delta = (torch.randn(rows, width).bfloat16() * 3 for _ in range(2))
    weight, out = torch.randn(width).bfloat16(), torch.empty(rows, width, dtype=torch.bfloat16)
    summed = (hidden.float() + delta.float()).bfloat16()
    for added in (hidden, summed):
        expected = functional.rms_norm(added.float(), (width,), weight.float(), 1e-3)
        if added is hidden:
            norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, 1e-3)
        else:
            add_norm(
                hidden.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, 1e-3
            )
        torch.testing.assert_close(out.float(), expected, atol=1e-6, rtol=2**-8)
    assert torch.equal(hidden, summed)


def test_gate() -> None:
    """Also where exp leaves fp32."""
    both = torch.cat([torch.linspace(-120, 120, 64), torch.randn(64)]).repeat(2, 1).bfloat16()
    out = torch.empty(2, 64, dtype=torch.bfloat16)
    gate(both.data_ptr(), out.data_ptr(), 2, 64)
    expected = functional.silu(both[:, :64].float()) * both[:, 64:].float()
    torch.testing.assert_close(out.float(), expected, atol=1e-30, rtol=2**-8)


def test_rotate_and_keep() -> None:
    num_heads, num_kv_heads, head_size = 4, 2, 32
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_size).bfloat16()
    before = qkv.view(3, -1, head_size).float()
    angles = torch.rand(10, head_size // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions, slots = torch.tensor([9, 0, 4]), torch.tensor([5, 2, 7])
    keys, values = (torch.zeros(8, num_kv_heads, head_size, dtype=torch.bfloat16) for _ in range(2))
    rotate_and_keep(num_heads, num_kv_heads, head_size)(
        qkv.data_ptr(), 3, positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
        keys.data_ptr(), values.data_ptr(),
    )  # fmt: skip
    rotated = rotate(before[:, :6], cos[positions][:, None], sin[positions][:, None])
    torch.testing.assert_close(qkv.view(3, -1, head_size)[:, :6].float(), rotated, atol=1e-6, rtol=2**-8)
    assert torch.equal(keys[slots], qkv.view(3, -1, head_size)[:, 4:6])
    assert torch.equal(values[slots].float(), before[:, 6:])
    assert not keys[[0, 1, 3, 4, 6]].any()


def test_rows_on_several_threads_are_those_of_one() -> None:
    hidden, delta = (torch.randn(50, 576).bfloat16() for _ in range(2))
    weight = torch.randn(576).bfloat16()
    for pair in ((norm, norm_spread), (gate, gate_spread), (add_norm, add_norm_spread)):
        found = []
        for run in pair:
            rows, out = hidden.clone(), torch.zeros(50, 576, dtype=torch.bfloat16)
            addresses = rows.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr()
            if pair[0] is add_norm:
                run(*addresses, 50, 576, 1e-5)
            elif pair[0] is norm:
                run(addresses[0], *addresses[2:], 50, 576, 1e-5)
            else:
                run(addresses[0], addresses[3], 50, 288)
            found.append((rows, out))
        (one_rows, one_out), (rows, out) = found
        assert torch.equal(one_rows, rows)
        assert torch.equal(one_out, out)
        assert one_out.any()


FIRST_CALLS = """
import numpy as np, torch
from diptych.engine.kernels.amx import can_multiply
from diptych.engine.kernels.paged_attention import paged_attention
from diptych.engine.kernels.tiled_decode import tiled_decode
from diptych.engine.kernels.tiled_prefill import tiled_prefill
rows, layer = torch.zeros(2, 4, 32).bfloat16(), torch.zeros(16, 4, 32).bfloat16()
addresses = rows.data_ptr(), 128, layer.data_ptr(), layer.data_ptr(), rows.data_ptr()
for make in (paged_attention, tiled_decode) if can_multiply() else (paged_attention,):
    make(4, 4, 32, 16, 1)(*addresses, np.zeros((2, 1), np.int64), np.array([1, 2]))
if can_multiply():
    tiled_prefill(4, 4, 32, 16, 1)(*addresses, 2, 0, np.zeros(1, np.int64))
"""


def test_another_process_finds_what_was_compiled(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", FIRST_CALLS], check=True, env=environment, timeout=170)
        found.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")})
    assert found[0]
    assert found[0] == found[1]
