"""A stream survives the death of its router: real processes, the toy model, the Python client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest

from diptych.client import Client, Piece
from diptych.domain.records import Role
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub
from tests.support.running_up import RunningUp, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = "A stream outlives whoever carries it. "
SLOW = {"DIPTYCH_TOY_STEP_DELAY_S": "0.05"}
NUM_TOKENS = 100


def ids_and_text(pieces: Iterable[Piece]) -> tuple[list[int], str]:
    """Fails unless indexes are contiguous and exactly the last piece is the end."""
    tokens: list[int] = []
    ends, text = [], ""
    for piece in pieces:
        assert piece.index == len(tokens) or not piece.tokens
        tokens += piece.tokens
        text += piece.text
        ends.append(piece.finish is not None)
    assert ends == [False] * (len(ends) - 1) + [True]
    return tokens, text


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
def test_the_stream_goes_on_at_the_router_that_was_started_again(
    tmp_path: Path, sampling: dict[str, float]
) -> None:
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    with RunningUp(tmp_path, **SLOW) as up, Client(up.router, timeout_s=120.0, reattach_s=60.0) as client:
        whole = ids_and_text(client.generate(PROMPT, **options))  # type: ignore[arg-type]
        answer = client.generate(PROMPT, **options)  # type: ignore[arg-type]
        first = next(answer)
        os.kill(up.pid_of("router-0"), signal.SIGKILL)
        pieces = [first, *answer]
    assert ids_and_text(pieces) == whole
    assert answer.num_reattached == 1
    assert pieces[-1].finish is not None
    assert pieces[-1].finish.trail.fallbacks == {"router_lost": 1}
