"""Sampling parameters on the wire, in both directions."""

from __future__ import annotations

from diptych.domain.errors import InvalidField
from diptych.domain.sampling import SamplingParams
from diptych.v1 import common_pb2


def params_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """With every field said, so that no peer fills in a default of its own."""
    return common_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
    )


def params_from_proto(message: common_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    """A peer's parameters, checked again. Raises InvalidField for the first field out of its bounds."""
    if not message.HasField("max_tokens") or not message.HasField("seed"):
        raise InvalidField("params", "a peer must say max_tokens and seed")
    params = SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
    )
    params.check(vocab_size)
    return params
