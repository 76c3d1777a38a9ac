"""Attention over paged KV: the seam that every kernel stands behind, and its plain form in torch.

An `Attention` is asked once a step to prepare for the batch's pieces, and answers with a function that
all layers then call. The step's own keys and values are in the pool by then. Scores are scaled by head_size
** -0.5, and a row at position p looks at positions 0 to p. `mixed` joins one form for decodes and one for
prefill pieces; those may differ in their last bits from one batch or chunk to another.
`diptych.engine.exact_attention` is the form that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from diptych.engine.batch import Piece

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""queries [rows, heads, head_size], a layer's keys and values [slots, kv_heads, head_size]
-> [rows, heads * head_size]. Rows beyond the pieces' (the exact profile's padding) come back as zeros."""

Attention = Callable[[Sequence[Piece], str], Attend]
"""Takes a batch's pieces (decodes first) and the device; called once a step."""

Call = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Like `Attend`, for some of the rows, which are written to the last argument [rows, heads, head_size]."""

DecodeForm = Callable[[Sequence[Piece], str], Call]
"""For all pieces of one row, together: rows 0 to len(pieces)."""

PrefillForm = Callable[[Piece, str], Call]
"""For one piece of several rows."""

_QUERY_TILE = 256
"""Rows of a prefill piece that are scored at once, against no more context than the last of them may see."""


def mixed(decode: DecodeForm, prefill: PrefillForm) -> Attention:
    """The two forms as one `Attention`, for batches without padding."""

    def attention(pieces: Sequence[Piece], device: str) -> Attend:
        num_decodes = sum(piece.num_rows == 1 for piece in pieces)
        calls = [prefill(piece, device) for piece in pieces[num_decodes:]]
        if num_decodes:
            calls.insert(0, decode(pieces[:num_decodes], device))

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            out = queries.new_empty(queries.shape)
            for call in calls:
                call(queries, keys, values, out)
            return out.view(len(queries), -1)

        return attend

    return attention


def sdpa_decode(pieces: Sequence[Piece], device: str) -> Call:
    """torch's scaled dot product on one padded batch: contexts gathered up to the longest."""
    longest = -(-max(piece.end for piece in pieces) // 16) * 16
    padded = np.full((len(pieces), longest), pieces[0].pool.null_slot, np.int64)
    for row, piece in zip(padded, pieces, strict=True):
        row[: piece.end] = piece.slots()
    slots = torch.from_numpy(padded).to(device)
    ends = torch.tensor([piece.end for piece in pieces], device=device)
    visible = (torch.arange(longest, device=device) < ends[:, None])[:, None, None, :]

    def call(queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        found = functional.scaled_dot_product_attention(
            queries[: len(pieces), :, None],
            _gathered(keys, slots).transpose(1, 2),
            _gathered(values, slots).transpose(1, 2),
            attn_mask=visible,
            enable_gqa=True,
        )
        out[: len(pieces)] = found[:, :, 0]

    return call


def sdpa_prefill(piece: Piece, device: str) -> Call:
    """torch's scaled dot product, in tiles of query rows."""
    slots = torch.from_numpy(piece.slots()).to(device)
    tiles = [
        (first, min(first + _QUERY_TILE, piece.num_rows)) for first in range(0, piece.num_rows, _QUERY_TILE)
    ]
    masks: list[Tensor] = []

    def call(queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        if not masks:  # the first layer's call makes them for all
            masks.extend(_mask(piece.start + first, piece.start + last, queries) for first, last in tiles)
        context_keys, context_values = (
            _gathered(layer, slots[None]).transpose(1, 2) for layer in (keys, values)
        )
        for (first, last), mask in zip(tiles, masks, strict=True):
            rows = slice(piece.row + first, piece.row + last)
            context = piece.start + last
            found = functional.scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None],
                context_keys[:, :, :context],
                context_values[:, :, :context],
                attn_mask=mask,
                enable_gqa=True,
            )
            out[rows] = found[0].transpose(0, 1)

    return call


def _mask(first: int, last: int, like: Tensor) -> Tensor:
    """What is added to the scores of positions `first` to `last`: [last - first, last], in `like`'s dtype."""
    positions = torch.arange(last, device=like.device)
    hidden = positions > positions[first:, None]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


sdpa = mixed(sdpa_decode, sdpa_prefill)
"""The plain form, for any device and dtype."""


def _gathered(layer: Tensor, slots: Tensor) -> Tensor:
    """The layer's rows at `slots` [sequences, context] as [sequences, context, kv_heads, head_size]."""
    return layer.index_select(0, slots.view(-1)).view(*slots.shape, *layer.shape[1:])
