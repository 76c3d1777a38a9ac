"""A stream survives the death of its router: real processes, the toy model, the Python client."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.client import Client, Piece
from diptych.domain.errors import PeerLost, Stale
from diptych.domain.records import Role
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub
from tests.support.router_process import Process
from tests.support.running_up import RunningUp, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = "A stream outlives whoever carries it. "
SECRET = "a secret of sixteen or more"
SLOW = {"DIPTYCH_TOY_STEP_DELAY_S": "0.05", "DIPTYCH_DETACH_GRACE_S": "60", "DIPTYCH_SECRET": SECRET}
SAMPLING = [{}, {"temperature": 0.9, "seed": 7}]
WAIT_S = 120.0


def ids_and_text(pieces: Iterable[Piece]) -> tuple[list[int], str]:
    """Fails unless indexes are contiguous and exactly the last piece is the end."""
    tokens: list[int] = []
    ends, text = [], ""
    for piece in pieces:
        assert piece.index == len(tokens)
        tokens += piece.tokens
        text += piece.text
        ends.append(piece.finish is not None)
    assert ends == [False] * (len(ends) - 1) + [True]
    return tokens, text


def client_of(*routers: str, **options: Any) -> Client:
    return Client(routers, timeout_s=WAIT_S, **{"reattach_s": 60.0, **options})


def kill(up: RunningUp, name: str) -> None:
    os.kill(up.pid_of(name), signal.SIGKILL)


def second_router(up: RunningUp) -> Process:
    """Another on the same store: not one that `up` would start again."""
    found = re.search(r"^store: ready on (\S+)", up.text, re.MULTILINE)
    assert found
    flags = ("--redis-url", found.group(1), "--model", "toy", "--worker-id", "router-1")
    return Process("-m", "services.router", *flags, env=up.env)


def inspect(address: str) -> worker_pb2.WorkerStatus:
    with grpc.insecure_channel(address) as channel:
        return WorkerStub(channel).Inspect(worker_pb2.InspectRequest(fresh=True), timeout=30)


def counters(address: str) -> dict[str, int]:
    return {counter.reason: counter.count for counter in inspect(address).counters}


def decodes(client: Client) -> dict[str, str]:
    """Addresses by id."""
    return {w.worker_id: w.address for w in client.status().workers if w.role is Role.DECODE}


def is_empty(address: str) -> bool:
    load = inspect(address).load
    return load.num_running == load.num_waiting == load.blocks_owned == load.slots_used == 0


def busy(client: Client) -> str:
    """The decode worker that has the request; its engine tells its load now and then."""
    found: list[str] = []

    def look() -> bool:
        found.extend(name for name, at in decodes(client).items() if not is_empty(at))
        return bool(found)

    wait_until(look, "a decode worker is busy")
    return found[0]


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seeded"])
def test_it_goes_on_at_the_router_that_was_started_again(tmp_path: Path, sampling: Any) -> None:
    options = {"max_tokens": 100, "ignore_eos": True, **sampling}
    with RunningUp(tmp_path, **SLOW) as up, client_of(up.router) as client:
        whole = ids_and_text(client.generate(PROMPT, **options))
        answer = client.generate(PROMPT, **options)
        pieces = [next(answer)]
        kill(up, "router-0")
        pieces += answer
        (address,) = decodes(client).values()
        wait_until(lambda: is_empty(address), "decode is empty")
        assert counters(address).items() >= {"attached": 1, "detached": 1}.items()
    assert ids_and_text(pieces) == whole
    assert answer.num_reattached == 1
    assert pieces[-1].finish is not None
    assert pieces[-1].finish.trail.fallbacks == {"router_lost": 1}


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seeded"])
def test_it_goes_on_at_another_router_and_survives_its_decode_worker_as_well(
    tmp_path: Path, sampling: Any
) -> None:
    options = {"max_tokens": 120, "ignore_eos": True, **sampling}
    with RunningUp(tmp_path, "--decode", "2", **SLOW) as up, second_router(up) as other:
        with client_of(other.address, up.router) as client:
            whole = ids_and_text(client.generate(PROMPT, **options))
            wait_until(lambda: len(decodes(client)) == 2, "both decode workers are listed")
            answer = client.generate(PROMPT, **options)
            pieces = [next(answer)]
            other.signal(signal.SIGKILL)
            pieces += [next(answer), next(answer)]
            assert answer.num_reattached == 1
            kill(up, busy(client))
            pieces += answer
    assert ids_and_text(pieces) == whole
    finish = pieces[-1].finish
    assert finish is not None
    assert finish.trail.num_resumed == 1
    assert finish.trail.fallbacks == {"decode_lost": 1, "router_lost": 1}


def test_it_goes_on_when_the_decode_worker_died_before_the_router(tmp_path: Path) -> None:
    options: Any = {"max_tokens": 120, "ignore_eos": True}
    with RunningUp(tmp_path, "--decode", "2", **SLOW) as up, second_router(up) as other:
        with client_of(other.address, up.router) as client:
            whole = ids_and_text(client.generate(PROMPT, **options))
            wait_until(lambda: len(decodes(client)) == 2, "both decode workers are listed")
            answer = client.generate(PROMPT, **options)
            pieces = [next(answer)]
            kill(up, busy(client))
            while not pieces[-1].index > 60:  # long after it has moved
                pieces.append(next(answer))
            other.signal(signal.SIGKILL)
            pieces += answer
    assert ids_and_text(pieces) == whole
    assert answer.num_reattached == 1
    assert pieces[-1].finish is not None
    assert pieces[-1].finish.trail.num_resumed == 1


def test_many_streams_outlive_two_deaths_of_their_router(tmp_path: Path) -> None:
    prompts = [f"{PROMPT}{i}" for i in range(8)]
    options: Any = {"max_tokens": 250, "ignore_eos": True, "temperature": 0.7, "seed": 11}
    with RunningUp(tmp_path, "--decode", "2", **SLOW) as up, client_of(up.router) as client:
        whole = [ids_and_text(list(client.generate(prompt, **options))) for prompt in prompts[:2]]
        answers = [client.generate(prompt, **options) for prompt in prompts]
        pieces = [[next(answer)] for answer in answers]
        kill(up, "router-0")
        for answer, found in zip(answers, pieces, strict=True):
            found.append(next(answer))
        kill(up, "router-0")
        for answer, found in zip(answers, pieces, strict=True):
            found += answer
        found = [ids_and_text(some) for some in pieces]
        assert found[:2] == whole
        assert [len(tokens) for tokens, _ in found] == [250] * 8
        assert {answer.num_reattached for answer in answers} <= {1, 2}
        for address in decodes(client).values():
            wait_until(lambda address=address: is_empty(address), "decode is empty")  # type: ignore[misc]


def test_what_ended_while_there_was_no_router_is_told(tmp_path: Path) -> None:
    options: Any = {"max_tokens": 12, "ignore_eos": True}
    with RunningUp(tmp_path, **SLOW) as up, client_of(up.router) as client:
        whole = ids_and_text(client.generate(PROMPT, **options))
        (address,) = decodes(client).values()
        answer = client.generate(PROMPT, **options)
        pieces = [next(answer)]
        kill(up, "router-0")
        wait_until(lambda: is_empty(address), "it has ended")
        pieces += answer
    assert ids_and_text(pieces) == whole


def test_a_stream_that_has_not_begun_goes_on_too(tmp_path: Path) -> None:
    options: Any = {"max_tokens": 10, "ignore_eos": True}
    slow = {**SLOW, "DIPTYCH_TOY_STEP_DELAY_S": "0.5"}
    with RunningUp(tmp_path, **slow) as up, client_of(up.router) as client:
        whole = ids_and_text(client.generate(PROMPT * 30, **options))
        (address,) = decodes(client).values()
        answer = client.generate(PROMPT * 31, **options)
        wait_until(lambda: not is_empty(address), "decode has it")
        kill(up, "router-0")
        pieces = list(answer)
        assert answer.num_reattached == 1
        again = ids_and_text(client.generate(PROMPT * 31, **options))
    assert ids_and_text(pieces) == again != whole


def test_a_client_that_never_comes_back_leaves_nothing(tmp_path: Path) -> None:
    grace = {"DIPTYCH_TOY_STEP_DELAY_S": "0.05", "DIPTYCH_DETACH_GRACE_S": "2"}
    with RunningUp(tmp_path, **grace) as up, client_of(up.router, reattach_s=0.0) as client:
        (address,) = decodes(client).values()
        answer = client.generate(PROMPT, max_tokens=3000, ignore_eos=True)
        next(answer)
        kill(up, "router-0")
        with pytest.raises(PeerLost):
            list(answer)
        wait_until(lambda: is_empty(address), "decode is empty")
        assert counters(address).items() >= {"detached": 1, "detached_expired": 1}.items()


def test_a_client_that_goes_from_a_living_router_leaves_nothing_at_once(tmp_path: Path) -> None:
    with RunningUp(tmp_path, **SLOW) as up, client_of(up.router) as client:
        (address,) = decodes(client).values()
        with client.generate(PROMPT, max_tokens=3000, ignore_eos=True) as answer:
            next(answer)
        wait_until(lambda: is_empty(address), "decode is empty", 20.0)  # well under the grace
        assert "detached" not in counters(address)


def test_a_request_whose_worker_is_gone_with_its_router_is_gone(tmp_path: Path) -> None:
    with RunningUp(tmp_path, **SLOW) as up, client_of(up.router) as client:
        answer = client.generate(PROMPT, max_tokens=3000, ignore_eos=True)
        next(answer)
        kill(up, "decode-0")
        kill(up, "router-0")
        with pytest.raises(Stale, match="decode worker decode-0@.* is gone: ask again"):
            list(answer)
        wait_until(lambda: up.num_ready("decode-0") == 2, "decode-0 is back")


def test_a_router_that_was_given_its_secret_knows_its_tokens_without_the_store(tmp_path: Path) -> None:
    options: Any = {"max_tokens": 150, "ignore_eos": True}
    with RunningUp(tmp_path, **SLOW) as up, client_of(up.router) as client:
        whole = ids_and_text(client.generate(PROMPT, **options))
        answer = client.generate(PROMPT, **options)
        pieces = [next(answer)]
        kill(up, "store")
        kill(up, "router-0")
        pieces += answer
        assert SECRET not in up.text
    assert ids_and_text(pieces) == whole
