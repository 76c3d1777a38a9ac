"""The whole system in containers, by the toy model: it serves, scales, and outlives what happens to them.

Every test begins with two decode workers, one of every other service, and ends with the same: all registered
again, the next answer right and handed off, and nothing left of any request, be it in a worker or in Redis.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.compose_stack import ROLES, Stack, build_images, docker, require_engine, wait_until
from tests.support.compose_streams import Streams, ask

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

TTL_S = 3.0
"""The services' own default."""
USER = "10001"
KILL_ENGINE = r"""
import os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if (process / "cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"services.decode.loop"]:
        os.kill(int(process.name), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    require_engine()
    build_images()
    with Stack("tests/compose/override.yml", DIPTYCH_MODEL="toy") as stack:
        yield stack


@pytest.fixture
def up(stack: Stack) -> Stack:
    """For tests that harm nothing."""
    stack.up("--scale", "decode=2")
    return stack


@pytest.fixture
def whole(up: Stack) -> Iterator[Stack]:
    """For tests that may harm whatever they like."""
    stack = up
    yield stack
    stack.up("--scale", "decode=2")
    wait_until(lambda: ask(stack.router).trail.path == "disaggregated", "prompts are handed off")
    stack.settled()


def worker_id(role: str, container: str) -> str:
    return f"{role}-{container[:12]}"


def is_known(stack: Stack, role: str, container: str) -> bool:
    return any(worker["worker_id"] == worker_id(role, container) for worker in stack.workers(role))


def busy(stack: Stack, role: str) -> str:
    """A container of the role; of decode workers one that has running requests."""
    found: list[str] = []

    def look() -> bool:
        loads = {worker["worker_id"]: worker["num_running"] for worker in stack.workers(role)}
        found.extend(c for c in stack.containers(role) if role != "decode" or loads.get(worker_id(role, c)))
        return bool(found)

    wait_until(look, f"a {role} worker is busy")
    return found[0]


def test_what_runs_is_what_the_status_shows(whole: Stack) -> None:
    finish = ask(whole.router)
    assert (finish.trail.path, finish.trail.fallbacks) == ("disaggregated", {})
    assert finish.trail.kv_bytes > 0
    assert ask(whole.router, prompt_tokens=20).trail.path == "local"
    ours = {worker_id(role, container) for role in ROLES for container in whole.containers(role)}
    assert {worker["worker_id"] for worker in whole.status()["workers"]} == ours
    assert len(ours) == 5


@pytest.mark.parametrize("role", ROLES)
def test_a_service_has_no_rights_that_it_does_not_need(up: Stack, role: str) -> None:
    container = up.containers(role)[0]
    seen = docker("exec", container, "sh", "-c", "cd /proc/1 && cat cmdline && echo && cat status maps")
    command, *lines = seen.splitlines()
    assert command.split("\0")[1:3] == ["-m", f"services.{role}"]
    status = dict(line.split(":", 1) for line in lines if ":\t" in line)
    assert set(status["Uid"].split()) == {USER}
    assert int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    host = up.inspect(container)["HostConfig"]
    assert (host["Privileged"], host["ReadonlyRootfs"], host["Memory"] > 0) == (False, True, True)
    assert ("libtcmalloc_minimal" in seen) == (role in ("prefill", "decode"))


NOT_FOR_ANYONE = ("SET x 1", "KEYS *", "FLUSHALL", "CONFIG GET *", "ACL LIST", "CLIENT LIST", "SCAN 0")
NOT_FOR = {
    "router": ("XADD diptych:{main}:prefill:main * a b", "HGETALL diptych:{main}:chunk:aa"),
    "cache": ("XADD diptych:{main}:prefill:main * a b", "HSET diptych:{main}:request:r a b"),
    "prefill": ("HSET diptych:{main}:chunk:aa a b", "HSET diptych:{main}:request:r a b"),
    "decode": ("HSET diptych:{main}:chunk:aa a b", "SADD diptych:{main}:holds:cache-0@1 a"),
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_touches_its_own_keys_only(up: Stack, role: str) -> None:
    others = [f"HSET diptych:{{main}}:worker:{other}-0 epoch 1" for other in ROLES if other != role]
    refused = [*NOT_FOR_ANYONE, *NOT_FOR[role], *others]
    allowed = [
        f"HSET diptych:{{main}}:worker:{role}-0 epoch 1",
        f"DEL diptych:{{main}}:worker:{role}-0",
        "PING",
    ]
    script = f"REDISCLI_AUTH=$(cat /run/diptych/{role}/password) redis-cli --user {role}"
    said = up.compose(
        "exec", "-T", "redis", "sh", "-c", script, stdin="".join(f"{line}\n" for line in refused + allowed)
    ).split("\n")
    answers = [line for line in said if line]
    assert [line.partition(" ")[0] for line in answers[: len(refused)]] == ["NOPERM"] * len(refused), said
    assert answers[len(refused) :] == ["1", "1", "PONG"]
    up.operator("ACL", "LOG", "RESET")


def test_nobody_gets_into_redis_without_a_password(up: Stack) -> None:
    assert "NOAUTH" in up.compose("exec", "-T", "redis", "redis-cli", "PING")
    redis = up.inspect(up.containers("redis")[0])
    assert redis["NetworkSettings"]["Ports"] == {"6379/tcp": None}


def test_each_of_three_decode_workers_is_used(whole: Stack) -> None:
    whole.up("--scale", "decode=3")
    wait_until(lambda: len(whole.workers("decode")) == 3, "three decode workers are registered")
    with Streams(whole.router, 9, num_tokens=12) as streams:
        pass
    used = {finish.trail.decode_worker for finish in streams.finishes}
    assert used == {worker_id("decode", container) for container in whole.containers("decode")}


@pytest.mark.parametrize("role", ["prefill", "decode", "cache"])
def test_streams_outlive_a_killed_worker(whole: Stack, role: str) -> None:
    with Streams(whole.router, 4, num_tokens=60) as streams:
        docker("kill", busy(whole, role))
        ask(whole.router)
    num_resumed = sum(finish.trail.num_resumed for finish in streams.finishes)
    assert (num_resumed > 0) == (role == "decode")


def test_a_killed_router_leaves_nothing_behind(whole: Stack) -> None:
    with Streams(whole.router, 4, num_tokens=400) as streams:
        docker("kill", whole.containers("router")[0])
        streams.abandon()
    whole.compose("start", "router")
    wait_until(lambda: len(whole.compose("ps", "-q", "router").split()) == 1, "the router is back")


def test_a_worker_whose_engine_dies_is_started_again(whole: Stack) -> None:
    container = whole.containers("decode")[0]
    begun = whole.inspect(container)["RestartCount"]
    docker("exec", container, "python", "-c", KILL_ENGINE)
    ask(whole.router)
    wait_until(lambda: whole.inspect(container)["RestartCount"] == begun + 1, "it was started again")


def test_without_redis_it_serves_and_with_it_hands_off_again(whole: Stack) -> None:
    with Streams(whole.router, 4, num_tokens=60):
        whole.compose("stop", "redis")
        wait_until(lambda: not whole.status()["store_available"], "the router sees that Redis is gone")
        assert ask(whole.router).trail.path == "local"
    whole.compose("start", "redis")
    wait_until(lambda: whole.status()["store_available"], "the router sees Redis again")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_outlive_a_worker_that_is_stopped_for_long(whole: Stack, role: str) -> None:
    with Streams(whole.router, 4, num_tokens=60) as streams:
        container = busy(whole, role)
        docker("pause", container)
        over = time.monotonic() + 3 * TTL_S
        ask(whole.router)
        wait_until(lambda: not is_known(whole, role, container), "its registration ends")
    wait_until(lambda: time.monotonic() > over, "three times its TTL is over")
    docker("unpause", container)
    wait_until(lambda: is_known(whole, role, container), "it registers again")
    assert role != "decode" or sum(finish.trail.num_resumed for finish in streams.finishes) > 0


@pytest.mark.parametrize("role", ["prefill", "decode", "cache"])
def test_streams_outlive_a_worker_without_network(whole: Stack, role: str) -> None:
    network = f"{whole.name}_default"
    with Streams(whole.router, 4, num_tokens=60):
        container = busy(whole, role)
        docker("network", "disconnect", network, container)
        ask(whole.router)
        wait_until(lambda: not is_known(whole, role, container), "its registration ends")
    docker("network", "connect", network, container)
    wait_until(lambda: is_known(whole, role, container), "it registers again")


def test_stopping_the_decode_workers_loses_no_token(whole: Stack) -> None:
    containers = whole.containers("decode")
    with Streams(whole.router, 4, num_tokens=80) as streams:
        whole.compose("stop", "decode")
    assert [finish.trail.num_resumed for finish in streams.finishes] == [0] * 4
    assert [whole.inspect(container)["State"]["ExitCode"] for container in containers] == [0, 0]


def test_a_password_may_be_chosen_and_nothing_is_left_in_the_end() -> None:
    require_engine()
    with Stack(
        "tests/compose/override.yml", DIPTYCH_MODEL="toy", REDIS_ROUTER_PASSWORD="of-my-own.1~"
    ) as stack:
        stack.up("redis")
        as_router = (
            "exec",
            "-T",
            "-e",
            "REDISCLI_AUTH=of-my-own.1~",
            "redis",
            "redis-cli",
            "--user",
            "router",
        )
        assert stack.compose(*as_router, "PING").strip() == "PONG"
        assert stack.remains()
    assert stack.remains() == []


def test_a_password_that_would_break_an_address_is_refused() -> None:
    require_engine()
    with Stack("tests/compose/override.yml", DIPTYCH_MODEL="toy", REDIS_CACHE_PASSWORD="a@b") as stack:
        with pytest.raises(AssertionError, match="the password of cache may hold"):
            stack.compose("run", "--rm", "redis")
