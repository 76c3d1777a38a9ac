"""`diptych audit` on a running system: a request leaves nothing, and what does not belong there is named."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from diptych.client import Client, Generation
from diptych.domain.ids import Attempt, ChunkHash, Epoch, RequestId, Tenant, WorkerId
from diptych.domain.records import RequestRecord, Tier
from diptych.store.connect import connect
from diptych.store.directory import ChunkDirectory
from diptych.store.requests import RequestProjection
from tests.support.running_up import RunningUp, run, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = "A prompt long enough that its prefill belongs on a prefill worker. " * 8
DEAD = Epoch(5)


def audit(folder: Path) -> tuple[int, dict[str, Any]]:
    done = run(folder, "audit", "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def in_store(up: RunningUp, act: Callable[[Redis], Awaitable[object]]) -> None:
    """Does something to the store that `up` started."""
    found = re.search(r"^store: ready on (\S+)", up.text, re.MULTILINE)
    assert found

    async def connected() -> None:
        redis = await connect(found.group(1))
        try:
            await act(redis)
        finally:
            await redis.aclose()

    asyncio.run(connected())


def held(told: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Kind and owner of what each worker holds."""
    return {
        member["worker_id"]: [(one["kind"], one["owner"]) for one in member["account"]["held"]]
        for member in told["members"]
        if member["account"] and member["account"]["held"]
    }


def stream(client: Client) -> Generation:
    return client.generate(LONG, max_tokens=3000, ignore_eos=True)


def test_a_running_request_is_shown_and_a_stopped_one_leaves_nothing(tmp_path: Path) -> None:
    slow = {"DIPTYCH_TOY_STEP_DELAY_S": "0.02"}
    with RunningUp(tmp_path, "--decode", "2", **slow) as up, Client(up.router, timeout_s=120.0) as client:
        with stream(client) as answer:
            next(answer)
            status, told = audit(tmp_path)
            assert (status, told["findings"]) == (0, [])
            [(worker, things)] = held(told).items()
            assert worker.startswith("decode-")
            assert [kind for kind, _ in things] == ["request"]
            assert things[0][1].startswith("router-0")
            assert told["store"]["num_requests"] == {"admitted": 1}

        def settled() -> bool:
            status, told = audit(tmp_path)
            assert (status, told["findings"]) == (0, [])
            return not held(told) and told["store"]["num_requests"] == {"ended": 1}

        wait_until(settled, "nothing is held")
        _, told = audit(tmp_path)
        engines = [m["account"] for m in told["members"] if m["account"] and m["account"]["blocks"][3]]
        assert len(engines) == 3
        for account in engines:
            free, cached, owned, total = account["blocks"]
            assert (owned, free + cached) == (0, total)
            assert account["leaked"] == 0
        printed = run(tmp_path, "audit")
        assert printed.returncode == 0
        assert "nothing is held that should not be" in printed.stdout


def test_what_was_planted_is_named(tmp_path: Path) -> None:
    async def plant(redis: Redis) -> None:
        await redis.set("diptych:{main}:plan", "b")
        record = RequestRecord(
            RequestId("r1"), Tenant(""), "admitted", WorkerId("decode-0"), DEAD, Attempt(0)
        )
        await RequestProjection(redis, "main").put(record)
        directory = ChunkDirectory(redis, "main")
        await directory.publish(WorkerId("cache-0"), DEAD, {ChunkHash(bytes(16)): Tier.L2})

    with RunningUp(tmp_path) as up:
        assert audit(tmp_path)[0] == 0
        in_store(up, plant)
        status, told = audit(tmp_path)
        assert status == 1
        assert {(finding["where"], finding["what"]) for finding in told["findings"]} == {
            ("store", "key plan (string)"),
            ("store", f"request r1 of decode-0@{DEAD}"),
            ("store", f"chunks of cache-0@{DEAD}"),
        }
        printed = run(tmp_path, "audit")
        assert printed.returncode == 1
        assert f"request r1 of decode-0@{DEAD}: its decode worker is dead" in printed.stdout


LEAKING = """
import sys
if "services.decode.loop" in sys.orig_argv:
    from diptych.domain.holding import Holding
    release = Holding.release
    def forgetful(holding):
        holding.tables[0].pop()
        release(holding)
    Holding.release = forgetful
"""


def test_a_block_that_a_worker_forgets_is_found_while_it_serves_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LEAKING)
    with RunningUp(tmp_path, PYTHONPATH=str(tmp_path)) as up, Client(up.router, timeout_s=120.0) as client:
        assert audit(tmp_path)[0] == 0
        for number in (1, 2):
            assert len(list(client.generate(f"{number} {LONG}", max_tokens=4, ignore_eos=True))) > 1

        def checked() -> bool:
            status, told = audit(tmp_path)
            return status == 1 and "belong to nobody" in told["findings"][0]["why"]

        wait_until(checked, "the worker has checked its books")
        status, told = audit(tmp_path)
        [finding] = told["findings"]
        assert (status, finding["where"], finding["what"]) == (1, "decode-0", "leaked blocks")
        [account] = [m["account"] for m in told["members"] if m["worker_id"] == "decode-0"]
        free, cached, owned, total = account["blocks"]
        assert (owned, account["leaked"], free + cached + owned) == (2, 2, total)
        assert account["counters"]["leaked_blocks"] == 2
        printed = run(tmp_path, "audit")
        assert printed.returncode == 1
        assert "decode-0: leaked blocks: 2 belong to nobody" in printed.stdout
        assert list(client.generate("it serves on", max_tokens=2, ignore_eos=True))


def test_a_worker_that_is_stopped_is_named_and_one_that_is_gone_is_not_asked(tmp_path: Path) -> None:
    with RunningUp(tmp_path, DIPTYCH_TTL_S="60") as up:
        pid = up.pid_of("prefill-0")
        os.kill(pid, signal.SIGSTOP)
        try:
            status, told = audit(tmp_path)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert status == 1
        assert [(f["where"], f["what"]) for f in told["findings"]] == [("prefill-0", "its registration")]
        wait_until(lambda: audit(tmp_path)[0] == 0, "it answers again")


def test_a_cache_that_is_killed_leaves_nothing_in_the_directory(tmp_path: Path) -> None:
    with RunningUp(tmp_path) as up, Client(up.router, timeout_s=120.0) as client:
        list(client.generate(LONG, max_tokens=4))

        def located() -> dict[str, int]:
            return dict(audit(tmp_path)[1]["store"]["locations"])

        wait_until(lambda: bool(located()), "the directory knows of chunks")
        os.kill(up.pid_of("cache-0"), signal.SIGKILL)
        wait_until(lambda: up.num_ready("cache-0") == 2, "the cache is back")
        wait_until(lambda: audit(tmp_path)[0] == 0, "nothing is left of the earlier one")
        assert located() == {}


def test_many_streams_of_which_some_are_stopped_leave_nothing(tmp_path: Path) -> None:
    def ask(number: int, router: str) -> None:
        with Client(router, timeout_s=120.0) as client:
            answer = client.generate(f"{number} {LONG}", max_tokens=40, ignore_eos=True)
            with answer:
                for piece in answer:
                    if number % 3 == 0 and piece.index >= number:
                        return

    with RunningUp(tmp_path, "--prefill", "2", DIPTYCH_TOY_STEP_DELAY_S="0.002") as up:
        asking = [threading.Thread(target=ask, args=(number, up.router)) for number in range(24)]
        for thread in asking:
            thread.start()
        assert audit(tmp_path)[1]["findings"] == []  # under load nothing looks lost either
        for thread in asking:
            thread.join(120)

        def settled() -> bool:
            status, told = audit(tmp_path)
            return status == 0 and not held(told)

        wait_until(settled, "nothing is held")
