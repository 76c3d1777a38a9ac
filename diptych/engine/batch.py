"""A plan as tensors: all sequences' new tokens in one flat batch, decodes first.

    rows     0 ...... D-1 | D ..............................  num_rows-1 | padding
             one token each | prefill pieces, each consecutive rows      | (exact profile only)

Built once a step and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.domain.ids import BlockId
from diptych.domain.plan import StepPlan
from diptych.engine.pool import GroupPool


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """`num_rows` rows of the batch, from `row` on: one sequence's positions `start` to `end`."""

    row: int
    num_rows: int
    start: int
    table: Sequence[BlockId]
    pool: GroupPool

    @property
    def end(self) -> int:
        """Positions that these rows' last may look at."""
        return self.start + self.num_rows

    @property
    def num_blocks(self) -> int:
        """Blocks of the table that hold positions 0 to `end`."""
        return -(-self.end // self.pool.block_tokens)

    def slots(self, multiple: int = 1) -> npt.NDArray[np.int64]:
        """Slots of positions 0 to `end`, padded with the null slot to a multiple of `multiple`."""
        return self.pool.slots(self.table, 0, self.end, -(-self.end // multiple) * multiple)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's input."""

    tokens: Tensor  # [rows + padding]
    positions: Tensor  # [rows + padding]
    write_slots: Tensor  # [rows]
    pieces: tuple[Piece, ...]
    sampled_rows: Tensor  # [steps that sample], in the plan's order

    @property
    def num_rows(self) -> int:
        """Rows without padding."""
        return len(self.write_slots)


def block_tables(pieces: Sequence[Piece]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Blocks [pieces, blocks], padded with 0, and ends [pieces]."""
    ends = np.array([piece.end for piece in pieces], np.int64)
    tables = np.zeros((len(pieces), max(piece.num_blocks for piece in pieces)), np.int64)
    for row, piece in zip(tables, pieces, strict=True):
        row[: piece.num_blocks] = piece.table[: piece.num_blocks]
    return tables, ends


def build_batch(plan: StepPlan, pool: GroupPool, row_tile: int, device: str) -> Batch:
    """The batch of a plan that has at least one step; rows are padded to a multiple of `row_tile`."""
    order = sorted(range(len(plan.steps)), key=lambda i: len(plan.steps[i].tokens) > 1)
    num_rows = plan.num_tokens
    tokens = np.zeros(-(-num_rows // row_tile) * row_tile, np.int64)
    positions = np.zeros_like(tokens)
    write_slots = np.empty(num_rows, np.int64)
    pieces: list[Piece] = []
    last_rows: dict[int, int] = {}
    row = 0
    for index in order:
        step = plan.steps[index]
        piece = Piece(row, len(step.tokens), step.start, step.tables[0], pool)
        rows = slice(row, row + piece.num_rows)
        tokens[rows] = step.tokens
        positions[rows] = np.arange(piece.start, piece.end) if piece.num_rows > 1 else piece.start
        write_slots[rows] = pool.slots(piece.table, piece.start, piece.end)
        pieces.append(piece)
        row += piece.num_rows
        last_rows[index] = row - 1
    sampled = [last_rows[i] for i, step in enumerate(plan.steps) if step.sample is not None]
    return Batch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        write_slots=torch.from_numpy(write_slots).to(device),
        pieces=tuple(pieces),
        sampled_rows=torch.tensor(sampled, dtype=torch.int64, device=device),
    )
