"""Which tensors a Llama-family model holds, and whether files hold them. Imports no torch.

Who resolves a model's name checks this from headers alone; who loads it checks the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diptych.domain.errors import Unsupported
from diptych.engine.config import ModelConfig

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
DTYPES = ("F32", "BF16", "F16")
_HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old exports carry and that follow from the config."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file describes it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config must hold."""
    hidden, ff = config.hidden_size, config.ff_size
    q_size, kv_size, _ = config.qkv_sizes
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[prefix + "mlp.gate_proj.weight"] = (ff, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (ff, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, ff)
    return shapes


def check_tensors(
    directory: Path, found: Mapping[str, StoredTensor], shapes: Shapes, optional: frozenset[str]
) -> None:
    """Raises Unsupported, naming a tensor, unless `found` are those of `shapes`, in formats that are served.

    `optional` names may be there or not.
    """
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        raise Unsupported(
            f"{directory}: tensor {missing[0]} is missing{_more(missing)}: "
            "a file was not copied, or config.json is of another model"
        )
    for name, shape in shapes.items():
        stored = found[name]
        if stored.dtype not in DTYPES:
            raise Unsupported(
                f"{stored.path}: tensor {name} is {stored.dtype}; served: {', '.join(DTYPES)} "
                "(take the model's unquantised weights)"
            )
        if stored.shape != shape:
            raise Unsupported(
                f"{stored.path}: tensor {name} is {list(stored.shape)}, config.json says {list(shape)}: "
                "one of the two is of another model"
            )
    known = shapes.keys() | optional
    extra = sorted(name for name in found.keys() - known if not name.endswith(_HARMLESS))
    if extra:
        raise Unsupported(
            f"{found[extra[0]].path}: tensor {extra[0]} does not belong to the architecture that config.json "
            f"names{_more(extra)}"
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
