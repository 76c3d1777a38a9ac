"""Runs one server and never lets it outlive whoever asked for it. A program of its own: standard library
only.

    parent ──pipe (stdin)──▶ guard ──PR_SET_PDEATHSIG──▶ server

The parent writes one line of JSON (what to run, its configuration, what to remove afterwards) and keeps the
pipe open. When the pipe ends, whether the parent closed it or was killed with SIGKILL, the guard kills the
server and tidies up. If the guard itself is killed, the kernel kills the server (Linux). The kernel sends
that signal when the *thread* that forked ends, so the guard forks from its main thread, and the parent may
start a guard from any thread.

The guard writes the server's process id to stdout, one line, and exits with the server. A server that ended
by itself leaves its log for the parent to read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def die_with_guard(guard: int) -> None:
    """Runs between fork and exec. Where the kernel has no such thing, the pipe alone must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before we asked
            os._exit(1)


def tidy(paths: list[str]) -> None:
    """Removes files, and folders with all that is in them."""
    for path in paths:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def main() -> int:
    """Runs the order that arrives on stdin; returns the server's exit status as a shell would give it."""
    order = json.loads(sys.stdin.readline())
    guard = os.getpid()
    with open(order["log"], "ab") as log:
        server = subprocess.Popen(
            order["command"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=order["folder"],
            preexec_fn=lambda: die_with_guard(guard),
        )
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already, and its log says why
        server.stdin.write(order["configuration"].encode())
        server.stdin.close()
    sys.stdout.write(f"{server.pid}\n")
    sys.stdout.flush()

    parent_is_gone = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        parent_is_gone.set()
        server.kill()

    threading.Thread(target=watch, daemon=True).start()
    status = server.wait()
    if parent_is_gone.is_set():
        tidy(order["remove"])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    os._exit(main())  # the watching thread may still hold stdin, and nothing else is open
