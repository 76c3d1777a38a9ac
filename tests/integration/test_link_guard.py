"""The latency guard on a running system: links are measured and shown, and slow ones not used when told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.client import Client, Finish
from tests.support.running_up import RunningUp, run, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = "A prompt long enough that its prefill belongs on a prefill worker. " * 8


def links(folder: Path) -> list[dict[str, Any]]:
    done = run(folder, "net", "--json")
    assert done.returncode == 0
    told: list[dict[str, Any]] = json.loads(done.stdout)
    return told


def wait_until_measured(folder: Path, count: int) -> list[dict[str, Any]]:
    wait_until(lambda: sum(link["rtt_s"] > 0 for link in links(folder)) == count, "every link is measured")
    return links(folder)


def ask(router: str, prompt: str) -> Finish:
    with Client(router, timeout_s=90.0) as client:
        finish = list(client.generate(prompt, max_tokens=4, ignore_eos=True))[-1].finish
    assert finish is not None
    return finish


def test_without_a_bound_links_are_shown_only(tmp_path: Path) -> None:
    with RunningUp(tmp_path, "--prefill", "2", "--decode", "2") as up:
        found = wait_until_measured(tmp_path, 8)
        assert {(link["decode_worker"], link["worker_id"], link["channel"]) for link in found} == {
            (f"decode-{d}", f"prefill-{p}", kind) for d in (0, 1) for p in (0, 1) for kind in ("nixl", "grpc")
        }
        assert all(0 < link["rtt_s"] < 5 and link["bytes_per_s"] > 0 for link in found)
        assert all(link["used"] and not link["too_slow"] for link in found)
        trail = ask(up.router, LONG).trail
        assert (trail.path, trail.channel, trail.fallbacks) == ("disaggregated", "nixl", {})
        shown = run(tmp_path, "net").stdout
        assert "µs" in shown
        assert "MiB/s" in shown


def test_past_a_bound_a_link_is_shown_and_still_used(tmp_path: Path) -> None:
    with RunningUp(tmp_path, DIPTYCH_MAX_RTT_US="0.001") as up:
        for link in wait_until_measured(tmp_path, 2):
            assert (link["too_slow"], link["used"], link["max_rtt_s"]) == (True, True, 1e-9)
        assert "too slow" in run(tmp_path, "net").stdout
        trail = ask(up.router, LONG).trail
        assert (trail.path, trail.fallbacks) == ("disaggregated", {})


def test_an_enforced_bound_keeps_every_prompt_local_and_counts_it(tmp_path: Path) -> None:
    told = {"DIPTYCH_MAX_RTT_US": "0.001", "DIPTYCH_ENFORCE_RTT": "true"}
    with RunningUp(tmp_path, "--prefill", "2", **told) as up:
        found = wait_until_measured(tmp_path, 4)
        assert [link["used"] for link in found] == [False] * 4
        for number in range(3):
            trail = ask(up.router, f"{number} {LONG}").trail
            assert (trail.path, trail.path_reason) == ("local", "link_too_slow")
            assert trail.fallbacks == {"link_too_slow": 1}
        assert "too slow, not used" in run(tmp_path, "net").stdout
        members = json.loads(run(tmp_path, "audit", "--json").stdout)["members"]
        counted = {m["worker_id"]: m["account"]["counters"] for m in members if m["account"]}
        assert counted["decode-0"]["link_too_slow"] == 3
        assert all("handed_off" not in counted[f"prefill-{number}"] for number in (0, 1))


def test_a_generous_bound_is_kept(tmp_path: Path) -> None:
    told = {"DIPTYCH_MAX_RTT_US": "20000000", "DIPTYCH_ENFORCE_RTT": "true", "DIPTYCH_CHANNELS": "grpc"}
    with RunningUp(tmp_path, **told) as up:
        [link] = wait_until_measured(tmp_path, 1)
        assert (link["too_slow"], link["used"], link["channel"]) == (False, True, "grpc")
        trail = ask(up.router, LONG).trail
        assert (trail.path, trail.channel) == ("disaggregated", "grpc")
