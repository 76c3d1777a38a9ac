"""Prefill workers and the cache killed, stopped and failed at each step of a request's way, on one system.

After each: the client has its whole answer, the right one, or one clear error; everybody is back; nothing is
left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from diptych.client import Client
from diptych.domain.errors import DiptychError
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub
from tests.support.running_up import RunningUp, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

POINTS = {
    "prefill": ("claimed", "begun", "engine_begun", "chunk", "manifest", "released", "done", "over"),
    "cache": ("offer",),
}
ACTIONS = ("kill", "stop", "error")
CASES = [
    (f"{role}.{point}", action) for role, points in POINTS.items() for point in points for action in ACTIONS
]

PROMPT = [(31 * i + i * i % 17) % 256 for i in range(600)]
NUM_TOKENS = 12


@dataclass(slots=True)
class System:
    up: RunningUp
    folder: Path
    expected: dict[float, list[int]]

    @property
    def armed(self) -> Path:
        return self.folder / "failpoints"

    def taken_by(self) -> int | None:
        """The process that acted."""
        found = list(self.folder.glob("failpoints.taken-*"))
        return int(found[0].name.rpartition("-")[2]) if found else None

    def disarm(self) -> None:
        for path in self.folder.glob("failpoints*"):
            path.unlink()


def ask(client: Client, temperature: float, salt: str) -> list[int]:
    tokens: list[int] = []
    for piece in client.generate(
        token_ids=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=temperature,
        seed=5,
        ignore_eos=True,
        cache_salt=salt,
    ):
        assert not piece.tokens or piece.index == len(tokens)
        tokens.extend(piece.tokens)
    return tokens


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("matrix")
    environment = {"DIPTYCH_FAILPOINTS": str(folder / "failpoints"), "DIPTYCH_TOY_STEP_DELAY_S": "0.01"}
    with RunningUp(folder, "--prefill", "2", "--decode", "2", **environment) as up:
        with Client(up.router, timeout_s=60.0) as client:
            expected = {t: ask(client, t, "reference") for t in (0.0, 0.9)}
        yield System(up, folder, expected)


def is_empty(address: str) -> bool:
    try:
        with grpc.insecure_channel(address) as channel:
            load = WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=10).load
    except grpc.RpcError:
        return False
    return load.num_running == load.num_waiting == load.blocks_owned == load.slots_used == 0


def all_empty(router: str) -> bool:
    try:
        with Client(router, timeout_s=20.0) as client:
            workers = client.status().workers
    except DiptychError:
        return False
    names = {w.worker_id for w in workers}
    return {"prefill-0", "prefill-1", "decode-0", "decode-1", "cache-0"} <= names and all(
        is_empty(w.address) for w in workers if w.worker_id.startswith(("prefill", "decode"))
    )


@pytest.mark.parametrize(("point", "action"), CASES, ids=lambda value: value)
def test_one_failure(system: System, point: str, action: str) -> None:
    system.disarm()
    system.armed.write_text(f"{point} {action}\n")
    temperature = 0.9 * (len(point) % 2)
    # A cache that has just come back is not offered anything yet: ask until the point was passed.
    for turn in range(20):
        with Client(system.up.router, timeout_s=60.0) as client:
            try:
                # A salt of its own: its prefix is cached nowhere, so that each step of the way is taken.
                tokens = ask(client, temperature, f"{point} {action} {turn}")
                assert tokens == system.expected[temperature]
            except DiptychError:
                assert action == "error"
        if system.taken_by() is not None:
            break
    wait_until(lambda: system.taken_by() is not None, f"{point} was passed", 20.0)
    if action == "stop":
        os.kill(system.taken_by() or 0, signal.SIGCONT)
    wait_until(lambda: all_empty(system.up.router), "everybody is back and nothing is left", 60.0)
