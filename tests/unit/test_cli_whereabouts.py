"""How a command finds the router of a running `diptych up`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.cli.whereabouts import announced, find_router, folder
from diptych.domain.errors import InvalidField, PeerLost


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("DIPTYCH_ROUTER", raising=False)
    return tmp_path


def leave_behind(pid: int, router: str, age_s: float = 0.0) -> Path:
    path = folder() / f"up-{pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"router": router, "pid": pid}), encoding="utf-8")
    os.utime(path, (1_000_000 - age_s, 1_000_000 - age_s))
    return path


def dead_pid() -> int:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


def test_an_announced_router_is_found_for_as_long_as_it_is() -> None:
    with announced("127.0.0.1:7") as problem:
        assert problem == ""
        assert find_router() == "127.0.0.1:7"
    with pytest.raises(PeerLost, match="start one with `diptych up`"):
        find_router()
    assert list(folder().iterdir()) == []


def test_a_folder_that_cannot_be_written_keeps_nobody_from_serving(runtime: Path) -> None:
    (runtime / "diptych").write_text("in the way", encoding="utf-8")
    with announced("127.0.0.1:7") as problem:
        assert str(runtime / "diptych") in problem
    with announced("127.0.0.1:7"), pytest.raises(PeerLost):
        find_router()


def test_the_flag_comes_before_the_variable_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with announced("127.0.0.1:7"):
        monkeypatch.setenv("DIPTYCH_ROUTER", "b:2")
        assert find_router() == "b:2"
        assert find_router("a:1") == "a:1"


def test_what_a_killed_up_left_is_swept() -> None:
    left = leave_behind(dead_pid(), "127.0.0.1:8")
    with pytest.raises(PeerLost):
        find_router()
    assert not left.exists()


def test_of_several_the_newest_counts() -> None:
    leave_behind(os.getppid(), "127.0.0.1:1", age_s=10)
    leave_behind(os.getpid(), "127.0.0.1:2")
    leave_behind(dead_pid(), "127.0.0.1:3", age_s=-10)
    assert find_router() == "127.0.0.1:2"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"router": "x:1", "pid": "me"}', '{"router": "x:1", "pid": 1e99}']
)
def test_a_torn_file_is_no_router(content: str) -> None:
    path = leave_behind(os.getpid(), "")
    path.write_text(content, encoding="utf-8")
    with pytest.raises(PeerLost):
        find_router()


def test_without_a_runtime_dir_the_cache_folder_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert folder() == tmp_path / "c/diptych/run"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache/diptych/run"


@pytest.mark.parametrize("address", ["localhost", "h:", ":1", "h:0", "h:65536", "h:x", "h:٣"])
def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with pytest.raises(InvalidField, match="^--router: "):
        find_router(address)
    monkeypatch.setenv("DIPTYCH_ROUTER", address)
    with pytest.raises(InvalidField, match="^DIPTYCH_ROUTER: "):
        find_router()
