"""How a model computes here: by the profile that is asked for, the device, and what is installed.

exact   fp32; rows and attention in tiles of fixed shapes
fast    bf16; fused kernels where they can be compiled for this model, else torch's own operations
Both    weights packed for oneDNN where it has kernels for the CPU
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from diptych.domain.errors import Unsupported
from diptych.domain.layout import KvDtype
from diptych.engine.attention import Attention, sdpa
from diptych.engine.config import ModelConfig
from diptych.engine.exact_attention import exact
from diptych.engine.linear import can_pack, packed, plain
from diptych.engine.llama import Form
from diptych.engine.settings import EngineSettings, Profile, Weights

_ROW_TILE = 16
"""Rows of every product in the exact profile: few enough for one decode, enough for a prefill."""
_AUTO_ROWS = 8
"""Up to here a step on 4-bit weights was measured faster than one on bf16; its arithmetic grows with rows."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A model's form, and the attention that goes with it."""

    form: Form
    attention: Attention


def kv_dtype(profile: Profile) -> KvDtype:
    """What keys and values are kept in; the model's weights have the same dtype."""
    return KvDtype.FLOAT32 if profile is Profile.EXACT else KvDtype.BFLOAT16


def computation(settings: EngineSettings, config: ModelConfig) -> Computation:
    """The fastest that keeps what the profile promises."""
    device = settings.device
    if settings.profile is Profile.EXACT:
        linear = packed if can_pack(device, torch.float32) else plain
        return Computation(Form(torch.float32, device, linear, row_tile=_ROW_TILE), exact)
    linear = packed if can_pack(device, torch.bfloat16) else plain
    if not can_fuse(device, config):
        return Computation(Form(torch.bfloat16, device, linear), sdpa)
    # Here, because numba takes its time to import.
    import numba

    from diptych.engine.fused import FusedOps, fused_attention

    numba.set_num_threads(min(settings.threads, vars(numba.config)["NUMBA_NUM_THREADS"]))
    form = Form(torch.bfloat16, device, linear, FusedOps, angle_dtype=torch.float32)
    return Computation(form, fused_attention(config, settings.block_tokens, settings.threads))


def few_row_limit(settings: EngineSettings, config: ModelConfig) -> int:
    """Most rows of a decode step on 4-bit weights; 0: there are none.

    Raises Unsupported when they are demanded of a model, or of a machine, that can't have them.
    """
    if settings.weights is Weights.BF16:
        return 0
    can = can_fuse(settings.device, config)
    if can:
        from diptych.engine.few_rows import can_shrink_model

        can = can_shrink_model(config)
    if can:
        return _AUTO_ROWS if settings.weights is Weights.AUTO else sys.maxsize
    if settings.weights is Weights.AUTO:
        return 0
    raise Unsupported(
        "int4 weights need a CPU, numba, and matrices of whole blocks of 16 outputs and 32 inputs"
    )


def can_fuse(device: str, config: ModelConfig) -> bool:
    """Whether the kernels serve this model: they take whole vectors of 16 elements, and need numba."""
    widths = (config.head_size // 2, config.hidden_size, config.ff_size)
    is_whole = config.head_size % 2 == 0 and all(width % 16 == 0 for width in widths)
    return device == "cpu" and is_whole and find_spec("numba") is not None
