"""Matrices in 4 bits for decode steps of few rows: see `diptych.engine.kernels.int4` for the layout."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine import memory
from diptych.engine.kernels.int4 import GROUP, GROUP_BYTES
from diptych.engine.kernels.vectors import LANES


@dataclass(frozen=True, slots=True, eq=False)
class Int4Matrix:
    """`num_outputs` x `num_inputs` weights in memory of their own."""

    data: Tensor  # uint8
    num_outputs: int
    num_inputs: int

    @property
    def address(self) -> int:
        """Of the first block."""
        return self.data.data_ptr()


def can_shrink(num_outputs: int, num_inputs: int) -> bool:
    """Whether a matrix has whole blocks and groups."""
    return num_outputs % LANES == 0 and num_inputs % GROUP == 0


def int4_bytes(num_outputs: int, num_inputs: int) -> int:
    """Of a matrix that `can_shrink`."""
    return num_outputs // LANES * (num_inputs // GROUP) * GROUP_BYTES


def shrink(weight: Tensor) -> Int4Matrix:
    """The nearest 4-bit numbers for a weight [outputs, inputs], between each group's lowest and highest."""
    num_outputs, num_inputs = weight.shape
    pages = memory.anonymous_pages(int4_bytes(num_outputs, num_inputs))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(pages, dtype=torch.uint8)
    blocks = data.view(num_outputs // LANES, num_inputs // GROUP, GROUP_BYTES)
    # [blocks, 16 outputs, groups, 32 inputs]
    grouped = weight.float().view(num_outputs // LANES, LANES, num_inputs // GROUP, GROUP)
    offsets = grouped.amin(-1)
    scales = ((grouped.amax(-1) - offsets) / 15).clamp_(min=1e-10)
    offsets, scales = offsets.bfloat16(), scales.bfloat16()
    numbers = grouped.sub(offsets[..., None].float()).div_(scales[..., None].float())
    numbers = numbers.round_().clamp_(0, 15).to(torch.uint8)
    pairs = (numbers[..., 0::2] | numbers[..., 1::2] << 4).permute(0, 2, 3, 1)  # [blocks, groups, 16, 16]
    for at, part in ((0, scales), (2 * LANES, offsets)):
        rows = part.transpose(1, 2).contiguous().view(torch.uint8)  # [blocks, groups, 16 * 2]
        blocks[..., at : at + 2 * LANES] = rows
    blocks[..., 4 * LANES :] = pairs.reshape(*blocks.shape[:2], -1)
    return Int4Matrix(data, num_outputs, num_inputs)


def grown(matrix: Int4Matrix) -> Tensor:
    """The weights that the numbers stand for, fp32 [outputs, inputs]."""
    blocks = matrix.data.view(-1, matrix.num_inputs // GROUP, GROUP_BYTES)
    scales, offsets = (
        blocks[..., at : at + 2 * LANES].contiguous().view(torch.bfloat16).float() for at in (0, 2 * LANES)
    )  # [blocks, groups, 16]
    pairs = blocks[..., 4 * LANES :].view(*blocks.shape[:2], GROUP // 2, LANES)
    numbers = torch.stack((pairs & 15, pairs >> 4), 3).view(*blocks.shape[:2], GROUP, LANES).float()
    weights = numbers * scales[:, :, None] + offsets[:, :, None]
    return weights.permute(0, 3, 1, 2).reshape(matrix.num_outputs, matrix.num_inputs)
