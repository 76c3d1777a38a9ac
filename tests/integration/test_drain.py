"""SIGTERM: streams and hand-offs under way end well, nothing new is taken, and the process leaves with 0."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from diptych.client import Client, Piece
from tests.support.running_up import RunningUp, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = [(31 * i + i * i % 17) % 256 for i in range(700)]
NUM_TOKENS = 30


class Asking(threading.Thread):
    """One request in the background."""

    def __init__(self, router: str, salt: str = "") -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self._router = router
        self._salt = salt
        self.start()

    def run(self) -> None:
        with Client(self._router, timeout_s=120.0) as client:
            for piece in client.generate(
                token_ids=PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, cache_salt=self._salt
            ):
                self.pieces.append(piece)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]


def test_a_decode_worker_that_leaves_finishes_its_streams(tmp_path: Path) -> None:
    with RunningUp(tmp_path, DIPTYCH_TOY_STEP_DELAY_S="0.05") as up:
        asking = Asking(up.router)
        wait_until(lambda: len(asking.tokens) >= 3, "tokens come")
        os.kill(up.pid_of("decode-0"), signal.SIGTERM)
        asking.join(120)
        finish = asking.pieces[-1].finish
        assert finish is not None
        assert finish.reason == "length"
        assert finish.trail.num_resumed == 0
        assert len(asking.tokens) == NUM_TOKENS
        wait_until(lambda: up.num_ready("decode-0") == 2, "the worker is back")
        assert "decode-0: ended with status 0" in up.text


def test_a_prefill_worker_that_leaves_finishes_its_hand_off(tmp_path: Path) -> None:
    with RunningUp(tmp_path, DIPTYCH_TOY_STEP_DELAY_S="0.5") as up:
        asking = Asking(up.router)
        with Client(up.router, timeout_s=60.0) as client:
            wait_until(
                lambda: any(w.worker_id == "prefill-0" and w.num_running for w in client.status().workers),
                "the prefill runs",
            )
        os.kill(up.pid_of("prefill-0"), signal.SIGTERM)
        asking.join(120)
        finish = asking.pieces[-1].finish
        assert finish is not None
        assert (finish.trail.path, finish.trail.attempts, finish.trail.fallbacks) == ("disaggregated", 1, {})
        wait_until(lambda: up.num_ready("prefill-0") == 2, "the worker is back")
        assert "prefill-0: ended with status 0" in up.text
