"""One `docker compose` project for tests: what a user would type, and what it looks like afterwards."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.support.valkey import probe_engine

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "diptych-test"
COMMAND_S = 600.0
WAIT_S = 120.0
AUDIT_S = 30.0
"""How long workers may take to become empty; they need a moment."""
LEFTOVERS = """
local prefix, left = 'diptych:{main}:', {}
local function lives(holder)
  local id, epoch = string.match(holder, '^(.*)@(%d+)$')
  return id and redis.call('HGET', prefix .. 'worker:' .. id, 'epoch') == epoch
end
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind, name = string.match(string.sub(key, #prefix + 1), '^(%a+):?(.*)$')
  local bad = redis.call('PTTL', key) < 0 and kind ~= 'secret'
  if kind == 'prefill' then bad = bad or redis.call('XLEN', key) > 0
  elseif kind == 'holds' then bad = bad or lives(name)
  elseif kind == 'chunk' then
    for _, holder in ipairs(redis.call('HKEYS', key)) do bad = bad or lives(holder) end
  elseif not string.find(' worker workers request secret ', ' ' .. tostring(kind) .. ' ') then bad = true
  end
  if bad then left[#left + 1] = key end
end
return left
"""
"""Jobs that nobody finished, chunks that somebody alive still claims to hold, keys that would stay for ever,
and keys of no known kind. What a dead holder had said, and a request's record, end by themselves; a secret
stays."""
ROLES = ("router", "cache", "prefill", "decode")


def require_engine() -> None:
    """Skips where no container engine answers (a failure under DIPTYCH_REQUIRE=compose)."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    try:
        probe_engine(host)
        docker("compose", "version")
    except (OSError, AssertionError) as error:
        pytest.skip(f"no container engine with compose answers at {host}: {error}")


def docker(*arguments: str, env: dict[str, str] | None = None, stdin: str = "") -> str:
    """What the command prints; fails with its words."""
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, env=env, input=stdin, capture_output=True, text=True,
        timeout=COMMAND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = WAIT_S) -> None:
    """Looks twice a second until `condition` holds; fails with `what` when it does not in time."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def build_images() -> str:
    """Builds both, and says how large they are beside what they are built upon."""
    docker("compose", "build", "model", "router", env={**os.environ, "DIPTYCH_IMAGE": IMAGE})
    sizes = {
        tag: int(docker("image", "inspect", "--format", "{{.Size}}", tag)) / 1e6
        for tag in ("python:3.11-slim", f"{IMAGE}:light", f"{IMAGE}:worker")
    }
    base, *ours = sizes.items()
    return ", ".join(f"{tag} {size:.0f} MB ({size - base[1]:.0f} of its own)" for tag, size in ours)


class Stack:
    """A project of its own. Entered: nothing runs yet. Left: nothing of it exists."""

    def __init__(self, *files: str, **settings: str) -> None:
        """`files`: besides docker-compose.yml. `settings`: as in a `.env`."""
        self.name = f"diptych-test-{secrets.token_hex(3)}"
        self.port = free_port()
        self._files = [word for file in ("docker-compose.yml", *files) for word in ("-f", file)]
        self.env = {
            **os.environ, "COMPOSE_PROJECT_NAME": self.name, "DIPTYCH_IMAGE": IMAGE,
            "DIPTYCH_PORT": str(self.port), **settings,
        }  # fmt: skip

    @property
    def router(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write(self.compose("logs", "--tail", "50"))
        self.compose("down", "-v", "--timeout", "5")
        assert self.remains() == []

    def compose(self, *arguments: str, stdin: str = "") -> str:
        return docker("compose", *self._files, *arguments, env=self.env, stdin=stdin)

    def up(self, *arguments: str) -> None:
        """Returns when every service is healthy.

        `--wait` gives up at once on one that is unhealthy just now, as one is that was paused a moment ago.
        """
        give_up = time.monotonic() + WAIT_S
        while True:
            try:
                self.compose("up", "-d", "--wait", "--no-build", *arguments)
            except AssertionError as error:
                if "is unhealthy" not in str(error) or time.monotonic() > give_up:
                    raise
                time.sleep(1.0)
            else:
                return

    def containers(self, service: str) -> list[str]:
        """Ids of its running containers."""
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(docker("inspect", container))
        return found[0]

    def operator(self, *command: str) -> str:
        """A command to Redis by the one who may do everything."""
        return self.compose("exec", "-T", "redis", "sh", "/etc/diptych/cli.sh", *command).strip()

    def status(self) -> dict[str, Any]:
        """`diptych status --json` from the host, through the published port."""
        done = subprocess.run(
            [sys.executable, "-m", "diptych.cli.main", "status", "--json", "--router", self.router],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def workers(self, role: str) -> list[dict[str, Any]]:
        """Those of a role that the router knows."""
        return [worker for worker in self.status()["workers"] if worker["role"] == role]

    def settled(self) -> None:
        """Everyone is registered, and nothing is left of any request: no block, slot, job, lease or chunk."""
        services = self.compose("ps", "--services", "--status", "running").split()
        wanted = {role: len(self.containers(role)) for role in ROLES if role in services}
        wait_until(
            lambda: Counter(w["role"] for w in self.status()["workers"]) == wanted, f"registered: {wanted}"
        )
        program = (ROOT / "tests/support/compose_audit.py").read_text(encoding="utf-8")
        said = self.compose("exec", "-T", "router", "python", "-", str(AUDIT_S), stdin=program)
        rows = [json.loads(line) for line in said.splitlines()]
        assert len(rows) == sum(wanted.values()), rows  # the router counts for itself
        for row in rows:
            assert not any(value for key, value in row.items() if key != "worker"), rows
        status = self.status()
        assert (status["num_live"], status["store_available"]) == (0, True)
        wait_until(lambda: self.leftovers() == [], "no job or chunk is left in Redis", AUDIT_S)
        assert self.operator("ACL", "LOG") == "", "a service was denied what it asked of Redis"

    def leftovers(self) -> list[str]:
        """Keys that should not be there at rest."""
        return self.operator("EVAL", LEFTOVERS, "0").split()

    def remains(self) -> list[str]:
        """What exists of the project: containers, volumes, networks."""
        mine = ("--filter", f"label=com.docker.compose.project={self.name}", "-q")
        commands: Sequence[tuple[str, ...]] = (("ps", "-a"), ("volume", "ls"), ("network", "ls"))
        return [line for command in commands for line in docker(*command, *mine).split()]
