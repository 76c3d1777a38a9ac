"""Random kills and stops under load: no token lost, none repeated, none wrong, and nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from diptych.client import Client
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub
from tests.support.chaos import Load, Question, disturb, undisturbed
from tests.support.running_up import RunningUp, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

NUM_DISTURBANCES = int(os.environ.get("DIPTYCH_CHAOS", "20"))
SEED = int(os.environ.get("DIPTYCH_CHAOS_SEED", "1"))
WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1", "cache-0"]
APART = ("--prefill", "2", "--decode", "2")


def questions(num_tokens: int) -> list[Question]:
    lengths = (5, 40, 270, 300, 520)
    return [Question(n, i, 0.9 * (i % 2), num_tokens) for i, n in enumerate(lengths)]


def is_empty(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        load = WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=30).load
    return load.num_running == load.num_waiting == load.blocks_owned == load.slots_used == 0


def run_chaos(folder: Path, num_tokens: int, times: int, *arguments: str, **environment: str) -> None:
    asked = questions(num_tokens)
    expected = undisturbed(folder, asked, *arguments)
    with RunningUp(folder, *arguments, *APART, **environment) as up:
        with Load(up.router, asked, num_clients=4) as load:
            done = disturb(up, WORKERS, times, SEED)
        outcome = load.outcome
        story = "\n".join([f"{outcome.num_resumed} resumed, {outcome.fallbacks}", *done])
        assert outcome.errors == [], story
        assert outcome.gaps == [], story
        wrong = [q for q, a in zip(outcome.asked, outcome.answers, strict=True) if a != expected[q]]
        assert wrong == [], story
        assert len(outcome.answers) >= 4
        with Client(up.router, timeout_s=60.0) as client:
            workers = [w for w in client.status().workers if not w.worker_id.startswith(("router", "cache"))]
        for worker in workers:
            wait_until(lambda worker=worker: is_empty(worker.address), f"{worker.worker_id} is empty")  # type: ignore[misc]


def test_the_toy_model_survives_anything(tmp_path: Path) -> None:
    run_chaos(tmp_path, 40, NUM_DISTURBANCES, DIPTYCH_TOY_STEP_DELAY_S="0.02")


@pytest.mark.engine
def test_the_real_model_survives_anything(tmp_path: Path) -> None:
    run_chaos(tmp_path, 10, NUM_DISTURBANCES // 2, "--model", "smollm2-135m", "--profile", "exact")
