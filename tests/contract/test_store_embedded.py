"""The embedded server: private, restartable, and never left behind."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.domain.errors import InvalidField, StoreUnavailable
from diptych.store.connect import connect
from diptych.store.embedded import EmbeddedServer
from tests.support.valkey import wait_for


def is_alive(pid: int) -> bool:
    """A zombie is dead."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


def pid_of(server: EmbeddedServer) -> int:
    assert server.pid is not None
    return server.pid


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Another process that started a server in a folder of the server's own; and the server's pid."""
    program = (
        "import sys, time; from diptych.store.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(); server.start(); print(server.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        yield process, pid
        process.kill()
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not is_alive(pid))
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)  # the test has failed, and nobody else would


async def test_it_serves_and_leaves_nothing_behind() -> None:
    server = EmbeddedServer()
    server.start()
    pid, folder = pid_of(server), server.log_path.parent
    server.start()
    assert pid_of(server) == pid, "it was running already"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    redis = await connect(server.url)
    assert await redis.set("a", "b")
    await redis.aclose()

    server.stop()

    assert not server.is_running
    assert not is_alive(pid)
    assert not folder.exists()
    server.stop()


async def test_a_folder_of_others_keeps_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("x", encoding="utf-8")
    with EmbeddedServer(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {"theirs", "valkey.sock", "valkey.log"}

    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


async def test_a_restart_keeps_the_address_and_not_the_data(valkey: EmbeddedServer) -> None:
    redis = await connect(valkey.url)
    await redis.set("a", "b")
    await redis.aclose()
    url, pid = valkey.url, pid_of(valkey)

    valkey.restart()

    assert (valkey.url, is_alive(pid)) == (url, False)
    folder = valkey.log_path.parent
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "valkey.sock")] == [0o700, 0o700]
    redis = await connect(url)
    assert await redis.get("a") is None
    await redis.aclose()


async def test_one_that_died_can_be_started_again(valkey: EmbeddedServer) -> None:
    os.kill(pid_of(valkey), signal.SIGKILL)
    wait_for(lambda: not valkey.is_running)

    valkey.start()

    redis = await connect(valkey.url)
    assert await redis.ping()
    await redis.aclose()


def test_a_stopped_one_can_be_killed(valkey: EmbeddedServer) -> None:
    pid = pid_of(valkey)
    os.kill(pid, signal.SIGSTOP)

    valkey.stop()

    assert not is_alive(pid)


def test_it_dies_with_its_parent(parent: tuple["subprocess.Popen[str]", int], tmp_path: Path) -> None:
    process, pid = parent
    process.kill()
    process.wait()

    wait_for(lambda: not is_alive(pid))
    wait_for(lambda: list(tmp_path.iterdir()) == [])


def test_it_dies_with_its_guard(parent: tuple["subprocess.Popen[str]", int]) -> None:
    _, pid = parent
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    guard = int(status.split("PPid:")[1].split()[0])

    os.kill(guard, signal.SIGKILL)

    wait_for(lambda: not is_alive(pid))


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "v")
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()

    assert is_alive(pid_of(server))
    assert server.is_running
    server.stop()


async def test_on_tcp_it_wants_a_password(tmp_path: Path, free_port: int) -> None:
    with EmbeddedServer(tmp_path / "v", tcp_port=free_port, password="geheim") as server:
        for url in (server.url, server.tcp_url):
            redis = await connect(url)
            assert await redis.ping()
            await redis.aclose()
        for url in (f"redis://127.0.0.1:{free_port}", f"redis://:falsch@127.0.0.1:{free_port}"):
            with pytest.raises(StoreUnavailable, match="password") as caught:
                await connect(url)
            assert "falsch" not in str(caught.value)
        commands = [
            path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)
        ]
        assert not any(b"geheim" in command for command in commands)
        assert b"geheim" not in server.log_path.read_bytes()


def test_a_random_password_where_none_is_given(free_port: int, tmp_path: Path) -> None:
    first, second = (EmbeddedServer(tmp_path / name, tcp_port=free_port) for name in "ab")
    assert first.tcp_url != second.tcp_url
    assert len(first.tcp_url) > len("redis://:@127.0.0.1:65535/0") + 20


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = EmbeddedServer(tmp_path / "v", tcp_port=port)
        with pytest.raises(InvalidField, match=f"tcp_port: {port} is taken"):
            server.start()
    assert not server.is_running
    server.start()
    server.stop()


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="tcp_port"):
        EmbeddedServer(tmp_path, tcp_port=70_000)
    with pytest.raises(InvalidField, match="folder"):
        EmbeddedServer(tmp_path / ("long" * 30))
    with pytest.raises(InvalidField, match="tcp_port"):
        _ = EmbeddedServer(tmp_path).tcp_url


def test_what_the_server_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="did not come up"):
        EmbeddedServer(tmp_path / "v", max_memory_bytes=-1).start()
