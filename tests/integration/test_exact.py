"""Profile `exact`: the same ids whether a prompt was prefilled elsewhere, or where it is decoded.

Real model, real processes, real hop; greedy and seeded, around the edges of blocks and chunks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.client import Client
from tests.support.running_up import RunningUp

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.timeout(600)]

LENGTHS = (3, 16, 17, 256, 257, 400)
NUM_TOKENS = 8
MODEL = ("--model", "smollm2-135m", "--profile", "exact")


def prompt(length: int) -> list[int]:
    return [(977 * i + 31 * length) % 48_000 + 100 for i in range(length)]


def answers(router: str, path: str) -> dict[tuple[int, float], list[int]]:
    """Ids by prompt length and temperature; each must have come by `path`."""
    found = {}
    with Client(router, timeout_s=300.0) as client:
        for length in LENGTHS:
            for temperature in (0.0, 0.9):
                pieces = list(
                    client.generate(
                        token_ids=prompt(length),
                        max_tokens=NUM_TOKENS,
                        temperature=temperature,
                        seed=length,
                        ignore_eos=True,
                        cache_salt=str(temperature),
                    )
                )
                finish = pieces[-1].finish
                assert finish is not None
                assert finish.trail.path == path
                assert finish.trail.fallbacks == {}
                found[length, temperature] = [token for piece in pieces for token in piece.tokens]
    return found


def test_disaggregated_equals_colocated_to_the_id(tmp_path: Path) -> None:
    with RunningUp(tmp_path, *MODEL, "--both", "1") as up:
        together = answers(up.router, "local")
    with RunningUp(tmp_path, *MODEL, "--threshold", "0") as up:
        apart = answers(up.router, "disaggregated")
    assert apart == together
    assert all(len(ids) == NUM_TOKENS for ids in apart.values())
