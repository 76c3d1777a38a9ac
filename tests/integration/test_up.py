"""`diptych up` with real services and the toy model: it serves, survives any death, leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from diptych.client import Client, Piece
from diptych.domain.records import Role
from tests.support.running_up import RunningUp, run, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = "A prompt long enough that its prefill belongs on a prefill worker. " * 8


def ask(router: str, prompt: str, max_tokens: int = 8) -> Piece:
    """The last piece of an answer, after checking that the stream is whole."""
    with Client(router, timeout_s=90.0) as client:
        pieces = list(client.generate(prompt, max_tokens=max_tokens, ignore_eos=True))
    tokens = [token for piece in pieces for token in piece.tokens]
    indexes = [piece.index + i for piece in pieces for i in range(len(piece.tokens))]
    assert indexes == list(range(max_tokens))
    assert len(tokens) == max_tokens
    assert [piece.finish is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    return pieces[-1]


def test_it_serves_and_every_command_finds_it(tmp_path: Path) -> None:
    with RunningUp(tmp_path, "--decode", "2") as up:
        last = ask(up.router, LONG)
        assert last.finish is not None
        assert (last.finish.reason, last.finish.trail.path) == ("length", "disaggregated")
        assert last.finish.trail.kv_bytes > 0

        short = ask(up.router, "Hi")
        assert short.finish is not None
        assert (short.finish.trail.path, short.finish.trail.kv_bytes) == ("local", 0)

        generated = run(tmp_path, "generate", LONG, "--max-tokens", "4")
        assert (generated.returncode, generated.stderr.split(",")[0]) == (0, "4 tokens (length)")
        status = json.loads(run(tmp_path, "status", "--json").stdout)
        listed = {worker["worker_id"]: worker["role"] for worker in status["workers"]}
        assert {"prefill-0", "decode-0", "decode-1"} <= set(listed)
        assert "toy" in run(tmp_path, "models").stdout
        assert run(tmp_path, "chat", stdin="Hello\n").returncode == 0

        for name in ("prefill-0", "decode-0", "decode-1", "cache-0", "router-0", "store"):
            assert up.num_ready(name) == 1


def test_a_plain_grpc_client_finds_health_and_reflection(tmp_path: Path) -> None:
    with RunningUp(tmp_path) as up, grpc.insecure_channel(up.router) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service="diptych.v1.Router"), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflected = ProtoReflectionDescriptorDatabase(channel)
        assert "diptych.v1.Router" in reflected.get_services()
        assert "Generate" in [
            m.name for m in reflected.FindFileContainingSymbol("diptych.v1.Router").service[0].method
        ]


@pytest.mark.parametrize("roles", [[], ["--both", "2"]], ids=["apart", "colocated"])
def test_the_death_of_any_one_leaves_it_serving(tmp_path: Path, roles: list[str]) -> None:
    with RunningUp(tmp_path, *roles) as up:
        ask(up.router, LONG)
        workers = ["both-0", "both-1"] if roles else ["prefill-0", "decode-0"]
        for name in (*workers, "cache-0", "router-0", "store"):
            os.kill(up.pid_of(name), signal.SIGKILL)
            wait_until(lambda name=name: up.num_ready(name) == 2, f"{name} is back")  # type: ignore[misc]
            assert f"{name}: was killed by SIGKILL" in up.text or name == "store"
            ask(up.router, f"{name} died. {LONG}")
        assert up.text.count("starting it again") == len(workers) + 3


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "cache-0"])
def test_the_next_request_is_served_before_the_dead_is_back(tmp_path: Path, victim: str) -> None:
    with RunningUp(tmp_path) as up:
        ask(up.router, LONG)
        os.kill(up.pid_of(victim), signal.SIGKILL)
        last = ask(up.router, f"At once. {LONG}")
        assert last.finish is not None
        wait_until(lambda: up.num_ready(victim) == 2, f"{victim} is back")


def busy(client: Client, role: Role) -> str:
    """A worker of that role that has a running request; the router hears of it with a heartbeat."""
    found: list[str] = []

    def look() -> bool:
        workers = client.status().workers
        found.extend(w.worker_id for w in workers if w.role is role and w.num_running)
        return bool(found)

    wait_until(look, f"a {role.value} worker is busy")
    return found[0]


def tokens_of(pieces: Iterable[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


def test_a_running_answer_survives_its_decode_worker(tmp_path: Path) -> None:
    with RunningUp(tmp_path, "--decode", "2", DIPTYCH_TOY_STEP_DELAY_S="0.05") as up:
        with Client(up.router, timeout_s=90.0) as client:
            whole = tokens_of(client.generate(LONG, max_tokens=120, ignore_eos=True))
            answer = client.generate(LONG, max_tokens=120, ignore_eos=True)
            first = next(answer)
            os.kill(up.pid_of(busy(client, Role.DECODE)), signal.SIGKILL)
            rest = list(answer)
        assert [*first.tokens, *tokens_of(rest)] == whole
        assert rest[-1].finish is not None
        assert rest[-1].finish.trail.num_resumed == 1
        assert rest[-1].finish.trail.fallbacks == {"decode_lost": 1}


def test_a_prompt_survives_its_prefill_worker(tmp_path: Path) -> None:
    prompt = LONG * 5
    with RunningUp(tmp_path, "--prefill", "2", DIPTYCH_TOY_STEP_DELAY_S="0.3") as up:
        with Client(up.router, timeout_s=90.0) as client:
            answer = client.generate(prompt, max_tokens=4, ignore_eos=True)
            os.kill(up.pid_of(busy(client, Role.PREFILL)), signal.SIGKILL)
            pieces = list(answer)
            again = tokens_of(client.generate(prompt, max_tokens=4, ignore_eos=True))
        assert tokens_of(pieces) == again
        assert pieces[-1].finish is not None
        # On a busy machine the one that has lost its fellow may be slow to begin, which is told as well.
        assert 1 <= sum(pieces[-1].finish.trail.fallbacks.values()) <= 2


def test_sigkill_of_up_leaves_nobody(tmp_path: Path) -> None:
    with RunningUp(tmp_path) as up:
        ask(up.router, LONG)
        assert len(up.left()) >= 9  # up, guard and store, router, cache, two workers of two processes each
        up.kill()
        wait_until(lambda: not up.left(), "nobody left", 20.0)
        gone = run(tmp_path, "status")
        assert gone.returncode == 1
        assert "start one with `diptych up`" in gone.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_wishes_to_leave_are_heard_too(tmp_path: Path, number: signal.Signals) -> None:
    with RunningUp(tmp_path) as up:
        up.process.send_signal(number)
        assert up.process.wait(60) == 0


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run(tmp_path, "up", "--model", "toy", "--port", str(port))
    assert refused.returncode == 1
    assert f"port: cannot listen on 127.0.0.1:{port} (Address already in use)" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_port_that_was_asked_for_is_had(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with RunningUp(tmp_path, "--port", str(port)) as up:
        assert up.router == f"127.0.0.1:{port}"


def test_a_store_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    refused = run(tmp_path, "up", "--model", "toy", REDIS_URL="redis://:secret@127.0.0.1:1")
    assert refused.returncode == 1
    assert "127.0.0.1:1" in refused.stderr
    assert "secret" not in refused.stdout + refused.stderr
    assert len(refused.stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{tmp}/nothing.gguf", "nothing.gguf: no such file"),
        ("{tmp}/torn.gguf", "torn.gguf"),
        ("{tmp}", "config.json"),
        ("no such model", "no such model"),
    ],
)
def test_a_model_that_is_none_is_named(tmp_path: Path, model: str, said: str) -> None:
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\3\0\0\0")
    refused = run(
        tmp_path, "up", "--model", model.format(tmp=tmp_path), DIPTYCH_CACHE=str(tmp_path / "cache")
    )
    assert refused.returncode == 1
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) <= 3


def test_a_worker_that_cannot_start_is_quoted(tmp_path: Path) -> None:
    refused = run(tmp_path, "up", "--model", "toy", DIPTYCH_NUM_BLOCKS="many")
    assert refused.returncode == 1
    assert "ended before it was ready" in refused.stderr
    assert "--num-blocks" in refused.stderr
