"""A cluster of real processes that only pretend to be services: start, restart, stop, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.cli import cluster as cluster_module
from diptych.cli.cluster import Cluster, StartFailed
from diptych.cli.layout import ClusterLayout, children
from diptych.cli.member import Change
from diptych.cli.supervision import State
from diptych.client import Client
from diptych.domain.errors import Cancelled, DeadlineExceeded
from diptych.store.embedded import EmbeddedServer

DEADLINE_S = 40.0

HOLDER = """
import sys, time
from pathlib import Path
from tests.unit.test_cli_cluster import pretended
from diptych.cli import cluster as module
from diptych.store.embedded import EmbeddedServer
module.children = pretended
store = EmbeddedServer()
from diptych.cli.layout import ClusterLayout
cluster = module.Cluster(ClusterLayout("toy", "toy", store.url), Path(sys.argv[1]), store)
cluster.start(lambda change: None, lambda: False)
print(*(member.pid for member in cluster.members), flush=True)
time.sleep(600)
"""


def pretended(layout: ClusterLayout) -> list[cluster_module.ChildSpec]:
    return [replace(spec, module="tests.support.fake_service") for spec in children(layout)]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Cluster]]:
    monkeypatch.setattr(cluster_module, "children", pretended)
    built: list[Cluster] = []

    def build(model: str) -> Cluster:
        built.append(Cluster(ClusterLayout(model, model, "redis://nobody"), tmp_path, None))
        return built[-1]

    yield build
    for cluster in built:
        cluster.stop(lambda: True)


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(cluster: Cluster) -> list[Change]:
    changes: list[Change] = []
    cluster.start(changes.append, lambda: False, DEADLINE_S)
    return changes


def test_everything_starts_serves_and_stops(build: Callable[[str], Cluster], tmp_path: Path) -> None:
    cluster = build("toy")
    changes = start(cluster)
    pids = [member.pid for member in cluster.members]

    assert sorted(change.name for change in changes) == ["cache-0", "decode-0", "prefill-0", "router-0"]
    assert all(is_alive(pid) for pid in pids)
    with Client(cluster.router) as client:
        assert client.status().router_id == "router-0"
    assert "listening on" in (tmp_path / "decode-0.log").read_text(encoding="utf-8")

    cluster.stop()
    assert not any(is_alive(pid) for pid in pids)
    cluster.stop()


def test_a_killed_child_comes_back_and_the_router_keeps_its_port(build: Callable[[str], Cluster]) -> None:
    cluster = build("toy")
    start(cluster)
    before = cluster.router
    for name in ("router-0", "decode-0"):
        member = next(member for member in cluster.members if member.name == name)
        old = member.pid
        os.kill(old, signal.SIGKILL)
        changes: list[Change] = []

        def is_back(member: cluster_module.Member = member, changes: list[Change] = changes) -> bool:
            changes += cluster.tick(time.monotonic())
            return member.supervision.num_restarts == 1 and member.state is State.READY

        wait_until(is_back)
        assert [change.name for change in changes] == [name, name]
        assert "SIGKILL" in changes[0].what
        assert member.pid != old
    assert cluster.router == before
    with Client(cluster.router) as client:
        assert client.status().router_id == "router-0"


def test_a_child_that_ends_at_the_start_is_quoted(build: Callable[[str], Cluster]) -> None:
    cluster = build("broken")
    with pytest.raises(StartFailed) as caught:
        start(cluster)
    first, second = str(caught.value).splitlines()
    assert first == f"decode-0 ended before it was ready (logs in {cluster.folder}):"
    assert second == "  InvalidField: model: 'broken' is no directory"


def test_a_child_that_never_gets_ready_has_a_deadline(
    build: Callable[[str], Cluster], tmp_path: Path
) -> None:
    cluster = build("mute")
    with pytest.raises(DeadlineExceeded, match="not ready: prefill-0, decode-0") as caught:
        cluster.start(lambda change: None, lambda: False, 1.5)
    assert str(tmp_path) in str(caught.value)


def test_a_worker_that_the_router_does_not_list_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[str], Cluster], tmp_path: Path
) -> None:
    with Cluster(ClusterLayout("toy", "toy", "redis://nobody", num_decode=2), tmp_path, None) as cluster:
        with pytest.raises(Cancelled):
            cluster.start(
                lambda change: None, lambda: all(m.state is State.READY for m in cluster.members), DEADLINE_S
            )
        assert cluster._missing() == "unknown to the router: decode-1"


def test_a_start_can_be_left(build: Callable[[str], Cluster]) -> None:
    with pytest.raises(Cancelled):
        build("mute").start(lambda change: None, lambda: True, DEADLINE_S)


@pytest.mark.parametrize("how", ["grace over", "in a hurry"])
def test_whoever_ignores_sigterm_is_killed(build: Callable[[str], Cluster], how: str) -> None:
    cluster = build("deaf")
    start(cluster)
    pids = [member.pid for member in cluster.members]
    if how == "grace over":
        cluster.stop(grace_s=0.2)
    else:
        cluster.stop(lambda: True)
    assert not any(is_alive(pid) for pid in pids)


def test_the_embedded_store_is_a_child_like_others(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[str], Cluster], tmp_path: Path
) -> None:
    store = EmbeddedServer()
    with Cluster(ClusterLayout("toy", "toy", store.url), tmp_path, store) as cluster:
        start(cluster)
        member = cluster.members[0]
        assert (member.name, member.address) == ("store", store.url)
        old = member.pid
        os.kill(old, signal.SIGKILL)

        def is_back() -> bool:
            cluster.tick(time.monotonic())
            return member.supervision.num_restarts == 1 and member.state is State.READY

        wait_until(is_back)
        pid = member.pid
        assert pid not in (0, old)
    assert not is_alive(pid)


def test_sigkill_of_the_parent_leaves_nobody(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        assert len(pids) == 5
        assert all(is_alive(pid) for pid in pids)
        holder.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
