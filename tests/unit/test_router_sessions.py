"""The router in front of decode workers of real gRPC: what a client gets, whatever happens to the workers."""

import asyncio

import grpc
import pytest

from diptych.domain.errors import LayoutMismatch
from tests.support.fake_decode import FakeDecode, expected_output, until
from tests.support.router_rig import RouterRig, text_of, tokens_of


async def test_a_request_is_streamed_to_its_end() -> None:
    async with FakeDecode() as worker, RouterRig(worker) as rig:
        pieces = await rig.generate("hello", 5, seed=7, temperature=0.5, stop=["x"])

        assert tokens_of(pieces) == expected_output(b"hello", 5)
        assert text_of(pieces) == "".join(f"<{token}>" for token in expected_output(b"hello", 5))
        finish = pieces[-1].finish
        assert finish
        assert finish.reason == "length"
        trail = finish.trail
        assert (trail.seed, trail.num_prompt_tokens, trail.num_output_tokens) == (7, 5, 5)
        assert (trail.decode_worker, trail.num_resumed) == ("decode-0", 0)
        assert len({piece.request_id for piece in pieces}) == 1
        (submit,) = worker.submits
        assert list(submit.tokens) == list(b"hello")
        assert (submit.num_tokens, submit.num_output, submit.placement) == (5, 0, 1)
        assert (submit.params.temperature, submit.params.top_p, list(submit.params.stop)) == (0.5, 1.0, ["x"])
