"""One running system: whose request is whose, and which way each of them went, as its client is told."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from diptych.client import Client, Finish, Piece
from diptych.domain.fallbacks import DISAGGREGATED, KV_BYTES, LOCAL, Fallback
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub
from tests.support.running_up import RunningUp, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = "A prompt long enough that its prefill belongs on a prefill worker. " * 8
LABEL = "one name for all"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with RunningUp(tmp_path_factory.mktemp("system"), DIPTYCH_TOY_STEP_DELAY_S="0.005") as up:
        yield up


def client_of(up: RunningUp, tenant: str = "") -> Client:
    return Client(up.router, tenant=tenant, timeout_s=60.0)


def counters(up: RunningUp, name: str) -> dict[str, int]:
    """What a worker has counted up to now."""
    with client_of(up) as client:
        address = next(w.address for w in client.status().workers if w.worker_id == name)
    with grpc.insecure_channel(address) as channel:
        status = WorkerStub(channel).Inspect(worker_pb2.InspectRequest(fresh=True), timeout=30)
    return {counter.reason: counter.count for counter in status.counters}


def ask(up: RunningUp, prompt: str) -> Finish:
    with client_of(up) as client:
        finish = list(client.generate(prompt, max_tokens=4, ignore_eos=True))[-1].finish
    assert finish is not None
    return finish


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


def test_a_label_is_nobodys_identity(up: RunningUp) -> None:
    """Two tenants, and one of them twice, give their requests the same name at the same time."""
    callers = ["a", "b", "a"]
    prompts = [f"{number}: {LONG}" for number in range(len(callers))]
    clients = [client_of(up, tenant) for tenant in callers]
    options = {"max_tokens": 120, "ignore_eos": True, "label": LABEL}
    alone = [
        tokens_of(list(client.generate(prompt, **options)))  # type: ignore[arg-type]
        for client, prompt in zip(clients, prompts, strict=True)
    ]
    streams = [
        client.generate(prompt, **options)  # type: ignore[arg-type]
        for client, prompt in zip(clients, prompts, strict=True)
    ]
    heard = [[next(stream)] for stream in streams]
    ids = [stream.request_id for stream in streams]
    assert len({*ids, LABEL}) == len(ids) + 1

    of_a, of_b = clients[:2]
    assert not of_a.cancel(LABEL), "a label names nothing"
    assert not of_b.cancel(ids[0]), "another's request is not there"
    assert not of_a.cancel(ids[1])
    assert of_a.cancel(ids[0])
    assert not of_b.cancel(ids[2])
    readers = [
        threading.Thread(target=pieces.extend, args=(stream,))
        for pieces, stream in zip(heard, streams, strict=True)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60.0)
    ends = [pieces[-1].finish.reason for pieces in heard if pieces[-1].finish]
    assert ends == ["abort", "length", "length"]
    cancelled = tokens_of(heard[0])
    assert cancelled == alone[0][: len(cancelled)]
    assert [tokens_of(pieces) for pieces in heard[1:]] == alone[1:]
    for client in clients:
        client.close()


def test_no_way_is_taken_silently(up: RunningUp) -> None:
    def new(before: dict[str, int], name: str = "decode-0") -> dict[str, int]:
        """What was counted since, of ways and fallbacks."""
        after = counters(up, name)
        ways = {*Fallback, DISAGGREGATED, *(word for word in after if word.startswith(LOCAL))}
        return {w: after[w] - before.get(w, 0) for w in ways if after.get(w, 0) > before.get(w, 0)}

    before, of_prefill = counters(up, "decode-0"), counters(up, "prefill-0")
    trails = [ask(up, f"plain {number}: {LONG}").trail for number in range(10)]
    assert {(t.path, t.path_reason, len(t.fallbacks), t.attempts) for t in trails} == {
        ("disaggregated", "long_prompt", 0, 1)
    }
    assert all(trail.kv_bytes > 0 for trail in trails)
    assert new(before) == {DISAGGREGATED: 10}
    moved = counters(up, "decode-0")[KV_BYTES] - before[KV_BYTES]
    assert moved == sum(trail.kv_bytes for trail in trails)
    wait_until(
        lambda: counters(up, "prefill-0")["handed_off"] - of_prefill["handed_off"] == 10,
        "ten were handed off",
    )

    before = counters(up, "decode-0")
    trail = ask(up, "Hi").trail
    assert (trail.path, trail.path_reason, trail.fallbacks, trail.kv_bytes) == (
        "local",
        "short_prompt",
        {},
        0,
    )
    assert new(before) == {LOCAL + "short_prompt": 1}

    before = counters(up, "decode-0")
    with stopped(up.pid_of("prefill-0")):
        trail = ask(up, f"nobody prefills: {LONG}").trail
    assert trail.path == "local"
    assert trail.fallbacks
    assert new(before) == {LOCAL + trail.path_reason: 1, **trail.fallbacks}

    def prefills() -> bool:
        return ask(up, f"{len(up.lines)} {os.urandom(4).hex()} {LONG}").trail.path == "disaggregated"

    wait_until(prefills, "it prefills again")
    store = re.search(r"^store: ready on .* \(pid (\d+)\)$", up.text, re.MULTILINE)
    assert store
    before = counters(up, "decode-0")
    with stopped(int(store.group(1))):
        trail = ask(up, f"nobody carries jobs: {LONG}").trail
    assert trail.path == "local"
    assert Fallback.STORE_UNAVAILABLE in trail.fallbacks
    assert new(before) == {LOCAL + trail.path_reason: 1, **trail.fallbacks}
