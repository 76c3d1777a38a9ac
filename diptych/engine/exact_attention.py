"""Attention whose result for a row depends on nothing but that row's query and the KV up to its position.

**Theory of operation.** Floating-point sums depend on their order, and a matrix product picks its order by
its shape. So every product here has one shape, whatever the batch and the chunking:

- A query at position p is row `p % QUERY_TILE` of a tile of QUERY_TILE rows; rows of the tile that are not
  part of the step are zeros. Rows of a product do not mix.
- Keys and values come in tiles of CONTEXT_TILE positions, counted from position 0 and padded with zeros. A
  query tile never straddles two of them (QUERY_TILE divides CONTEXT_TILE), so that a row at p meets tiles 0
  to `p // CONTEXT_TILE` in order, always as many, joined by online softmax (Milakov and Gimelshein, 2018).
- What a row may not see is weighed with exactly 0, and adding `0 * finite` changes no bit. So it does not
  matter whether the positions after p hold this chunk's KV or still the null block's zeros.

That products of one shape treat all their rows alike is a property of the BLAS library, which tests check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.attention import Attend
from diptych.engine.batch import Piece

QUERY_TILE = 16
CONTEXT_TILE = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Query rows `row` to `row + num_rows` of the batch, from row `offset` of the tile on."""

    row: int
    num_rows: int
    offset: int
    num_context_tiles: int
    hidden: Tensor  # [QUERY_TILE, CONTEXT_TILE], True where the last context tile's positions are not visible


def exact(pieces: Sequence[Piece], device: str) -> Attend:
    """An `Attention`; see the module. fp32 queries, keys and values."""
    hidden = _hidden_masks(device)
    work = [
        (torch.from_numpy(piece.slots(CONTEXT_TILE)).to(device), _tiles(piece, hidden)) for piece in pieces
    ]

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.zeros_like(queries)  # also for the rows of padding
        for slots, tiles in work:
            context_keys = keys.index_select(0, slots).permute(1, 2, 0)  # [kv_heads, head_size, context]
            context_values = values.index_select(0, slots).transpose(0, 1)  # [kv_heads, context, head_size]
            for tile in tiles:
                rows = slice(tile.row, tile.row + tile.num_rows)
                out[rows] = _attend_tile(queries[rows], context_keys, context_values, tile)
        return out.view(len(queries), -1)

    return attend


def _hidden_masks(device: str) -> list[Tensor]:
    """Entry i: what a query tile hides that starts i tiles into its context tile."""
    positions = torch.arange(CONTEXT_TILE, device=device)
    return [positions > rows[:, None] for rows in torch.split(positions, QUERY_TILE)]


def _tiles(piece: Piece, hidden: list[Tensor]) -> list[_Tile]:
    tiles = []
    position = piece.start
    while position < piece.end:
        offset = position % QUERY_TILE
        num_rows = min(QUERY_TILE - offset, piece.end - position)
        tiles.append(
            _Tile(
                row=piece.row + position - piece.start,
                num_rows=num_rows,
                offset=offset,
                num_context_tiles=position // CONTEXT_TILE + 1,
                hidden=hidden[position % CONTEXT_TILE // QUERY_TILE],
            )
        )
        position += num_rows
    return tiles


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, tile: _Tile) -> Tensor:
    """One query tile [num_rows, heads, head_size] against its context tiles, in order."""
    num_kv_heads, head_size, _ = keys.shape
    heads = queries.shape[1]
    padded = queries.new_zeros(QUERY_TILE, heads, head_size)
    padded[tile.offset : tile.offset + tile.num_rows] = queries
    padded *= head_size**-0.5
    # [kv_heads, heads of the group and rows, head_size]: a group's heads share one product.
    grouped = padded.transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    maximum = grouped.new_full((*grouped.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    mixed = torch.zeros_like(grouped)
    for index in range(tile.num_context_tiles):
        part = slice(index * CONTEXT_TILE, (index + 1) * CONTEXT_TILE)
        scores = torch.bmm(grouped, keys[:, :, part])
        if index == tile.num_context_tiles - 1:
            rows = scores.view(num_kv_heads, -1, QUERY_TILE, CONTEXT_TILE)
            rows.masked_fill_(tile.hidden, -torch.inf)
        raised = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = (scores - raised).exp_()
        fade = (maximum - raised).exp_()
        total = total * fade + weights.sum(-1, keepdim=True)
        mixed = mixed * fade + torch.bmm(weights, values[:, part])
        maximum = raised
    found = (mixed / total).view(heads, QUERY_TILE, head_size).transpose(0, 1)
    return found[tile.offset : tile.offset + tile.num_rows]
