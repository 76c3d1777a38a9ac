"""The cache of model directories: whole or absent, built once, whoever dies when."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.engine import model_cache
from diptych.engine.model_cache import cache_dir, cached_digest, install, is_whole


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Build:
    """Writes two files and counts how often it was asked to."""

    def __init__(self, text: str = "abc") -> None:
        self.text = text
        self.count = 0

    def __call__(self, directory: Path) -> None:
        self.count += 1
        (directory / "a").write_text(self.text)
        (directory / "b").write_bytes(b"x" * 1000)


def leftovers(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()} - {"m", ".m.lock"}


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("DIPTYCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "diptych"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "diptych"


def test_built_once(cache: Path) -> None:
    build = Build()
    place = install("m", "1", build)
    assert place == install("m", "1", build) == cache / "models" / "m"
    assert build.count == 1
    assert not leftovers(cache)


def test_another_identity_replaces_it(cache: Path) -> None:
    install("m", "1", Build("old"))
    place = install("m", "2", Build("new"))
    assert (place / "a").read_text() == "new"
    assert not leftovers(cache)


@pytest.mark.parametrize("damage", ["truncate", "remove", "seal", "torn seal", "odd seal"])
def test_what_is_torn_is_built_again(cache: Path, damage: str) -> None:
    place = install("m", "1", Build())
    seal = place / model_cache.SEAL
    if damage == "truncate":
        (place / "b").write_bytes(b"x" * 999)
    elif damage == "remove":
        (place / "a").unlink()
    elif damage == "seal":
        seal.unlink()
    elif damage == "torn seal":
        seal.write_text(seal.read_text()[:20])
    else:
        seal.write_text(json.dumps([1]))
    assert not is_whole(place, "1")
    build = Build()
    install("m", "1", build)
    assert build.count == 1
    assert is_whole(place, "1")
    assert not leftovers(cache)


def test_a_build_that_fails_leaves_what_was_there(cache: Path) -> None:
    install("m", "1", Build("old"))

    def fails(directory: Path) -> None:
        (directory / "a").write_text("half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        install("m", "2", fails)
    assert (cache / "models" / "m" / "a").read_text() == "old"
    assert not leftovers(cache)


KILLED = """
import os, signal, sys
from pathlib import Path
from diptych.engine.model_cache import install

def build(directory: Path) -> None:
    (directory / "a").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

install("m", "1", build)
"""


def test_a_builder_that_is_killed_blocks_nobody(cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], timeout=50, check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert leftovers(cache)
    assert not (cache / "models" / "m").exists()
    install("m", "1", Build())
    assert not leftovers(cache)


def build_slowly(directory: Path) -> None:
    with (directory.parent.parent.parent / "builds").open("a") as log:
        log.write("x")
    (directory / "a").write_bytes(os.urandom(1 << 22))


def install_in_child(start: "multiprocessing.synchronize.Barrier") -> None:
    start.wait(50)
    install("m", "1", build_slowly)


def test_processes_that_start_together_build_once(cache: Path) -> None:
    cache.mkdir()
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(3)
    children = [spawn.Process(target=install_in_child, args=(start,)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(50)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (cache / "builds").read_text() == "x"
    assert is_whole(cache / "models" / "m", "1")


def test_a_digest_is_computed_once_until_a_file_changes(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"one")
    calls: list[bytes] = []

    def compute() -> bytes:
        calls.append(path.read_bytes())
        return calls[-1].ljust(16)

    assert cached_digest([path], compute) == cached_digest([path], compute) == b"one".ljust(16)
    assert calls == [b"one"]
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same inode, size and time of modification
    assert cached_digest([path], compute) == b"two".ljust(16)
    [place] = (cache / "digests").iterdir()
    place.write_text("{")
    assert cached_digest([path], compute) == b"two".ljust(16)
    assert len(calls) == 3


def test_a_cache_that_can_not_be_written_costs_only_time(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file where the folder should be")
    path = tmp_path / "w"
    path.write_bytes(b"one")
    assert cached_digest([path], lambda: b"d" * 16) == b"d" * 16
