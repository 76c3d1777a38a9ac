"""What `diptych doctor` looks at: one function a thing, each gives a `Finding` and changes nothing.

Torch and NIXL are asked in processes of their own: the command line never imports them, and a broken install
of theirs may end a process.
"""

from __future__ import annotations

import asyncio
import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from diptych.cli import figures
from diptych.domain.errors import DiptychError
from diptych.engine.catalog import DEFAULT, installed
from diptych.store.connect import connect, redacted
from diptych.store.embedded import valkey_binary

LEAST_PYTHON: Final = (3, 11)
LEAST_MEMORY_BYTES: Final = 3 << 30
"""Two workers with the default model, its KV pools and the rest."""
ALLOCATOR: Final = "tcmalloc_minimal"
PORT: Final = 7400
"""Where `docker compose up` publishes the router."""
PROBE_S: Final = 60.0
PIN: Final = re.compile(r"""([\w.-]+)==([^\s;]+)(?:\s*;\s*extra\s*==\s*['"](\w+)['"])?""")
TORCH: Final = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "gpus": gpus, "threads": torch.get_num_threads()}))
"""


class State(StrEnum):
    """How good a finding is."""

    OK = "ok"
    LACKS = "lacks"
    """Works without, at a cost."""
    BROKEN = "broken"
    """Nothing works without."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what its lack costs; empty where nothing lacks."""

    name: str
    state: State
    found: str
    cost: str = ""


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, State.OK, found)


def lacks(name: str, found: str, cost: str) -> Finding:
    """It works without, at this cost."""
    return Finding(name, State.LACKS, found, cost)


def broken(name: str, found: str, cost: str) -> Finding:
    """Nothing works without; `cost` is what to do."""
    return Finding(name, State.BROKEN, found, cost)


def python(version: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    """The interpreter that runs us."""
    text = ".".join(map(str, version))
    if version[:2] < LEAST_PYTHON:
        return broken("python", text, f"needs {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} or later")
    return ok("python", text)


def packages(
    pins: Sequence[str] | None = None, version_of: Callable[[str], str] = importlib.metadata.version
) -> Finding:
    """The packages that every process needs, against the versions that were tested together."""
    if pins is None:
        pins = importlib.metadata.requires("diptych") or []
    absent, other, count = [], [], 0
    for name, wanted, extra in (match.groups() for pin in pins if (match := PIN.match(pin))):
        if extra:
            continue
        count += 1
        try:
            found = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if found != wanted:
            other.append(f"{name} {found} (tested: {wanted})")
    if absent:
        return broken("packages", f"not installed: {', '.join(absent)}", "install diptych anew with pip")
    if other:
        return lacks("packages", ", ".join(other), "not what was tested: `make setup` installs what was")
    return ok("packages", f"{count}, as tested")


def torch(probe: Callable[[str], str] | None = None) -> Finding:
    """The engine's library, and the devices that it sees."""
    if probe is None:
        if importlib.util.find_spec("torch") is None:
            return lacks("torch", "not installed", "only the toy model: pip install 'diptych[engine]'")
        probe = _said_by
    try:
        told = json.loads(probe(TORCH))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return lacks("torch", f"does not import: {error}", "only the toy model runs")
    found = f"{told['version']}, {', '.join(told['gpus']) or 'CPU'}"
    if told["gpus"]:
        return ok("torch", found)
    return lacks("torch", found, "no GPU: small models only, at the speed of memory")


def nixl(probe: Callable[[str], str] | None = None) -> Finding:
    """The transfer library for RDMA and NVLink."""
    cost = "KV crosses over gRPC: fine on one machine and on plain networks, no RDMA"
    name = next((n for n in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(n)), "")
    if probe is None and not name:
        return lacks("NIXL", "not installed", cost)
    try:
        version = (probe or _said_by)(
            f"import {name or 'nixl_cu12'} as n; print(getattr(n, '__version__', ''))"
        )
    except (OSError, subprocess.SubprocessError) as error:
        return lacks("NIXL", f"does not import: {error}", cost)
    return ok("NIXL", f"{name} {version}".strip())


def tcmalloc(find: Callable[[str], str | None] = ctypes.util.find_library) -> Finding:
    """The allocator that workers preload."""
    library = find(ALLOCATOR)
    if library:
        return ok("tcmalloc", library)
    return lacks("tcmalloc", "not found", "a decode step takes a fifth longer (Debian: libtcmalloc-minimal4)")


def containers(run: Callable[[Sequence[str]], str] | None = None) -> Finding:
    """A container engine that answers, and compose."""
    run = run or _output
    cost = "no `docker compose up`; `diptych up` needs neither"
    try:
        engine = run(["docker", "version", "--format", "{{.Server.Version}}"])
        compose = run(["docker", "compose", "version", "--short"])
    except FileNotFoundError:
        return lacks("containers", "no docker command", cost)
    except (OSError, subprocess.SubprocessError) as error:
        return lacks("containers", str(error), cost)
    return ok("containers", f"engine {engine}, compose {compose}")


def ports(port: int = PORT) -> Finding:
    """Loopback can be bound, and the router's usual port is free."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        return broken("ports", f"127.0.0.1 can't be bound: {error}", "services could not listen")
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        return lacks(
            "ports", f"{port}: {reason}", "for compose, set DIPTYCH_PORT; `diptych up` takes a free one"
        )
    return ok("ports", f"{port} is free")


def cores(count: int | None = None) -> Finding:
    """CPU cores that we may use."""
    if count is None:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < 2:
        return lacks("cores", str(count), "prefill and decode share one core: each slows the other")
    return ok("cores", str(count))


def memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Memory that is available."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    if not found:
        return lacks("memory", "unknown on this system", "workers find out when they start")
    num_bytes = int(found[1]) << 10
    if num_bytes < LEAST_MEMORY_BYTES:
        return lacks(
            "memory", f"{figures.size(num_bytes)} available",
            f"the default model with two workers wants {figures.size(LEAST_MEMORY_BYTES)}: "
            "start `diptych up --both 1`, or set DIPTYCH_NUM_BLOCKS",
        )  # fmt: skip
    return ok("memory", f"{figures.size(num_bytes)} available")


def redis(url: str | None = None) -> Finding:
    """The store that REDIS_URL names, else the one that ships with us."""
    url = os.environ.get("REDIS_URL", "") if url is None else url
    try:
        if not url:
            return ok("Redis", f"embedded ({valkey_binary().name}); REDIS_URL is not set")
        asyncio.run(_reach(url))
    except DiptychError as error:
        advice = "set REDIS_URL to a Redis 7 or Valkey that answers" + ("" if not url else ", or unset it")
        return broken("Redis", str(error), advice)
    return ok("Redis", f"{redacted(url)} answers")


def model() -> Finding:
    """The default model's files."""
    names = [found.name for found in installed()]
    if DEFAULT in names:
        return ok("model", ", ".join(names))
    return lacks("model", f"{DEFAULT} is not here yet", "the first start fetches 100 MB, once")


ALL: Final[tuple[Callable[[], Finding], ...]] = (
    python, packages, torch, nixl, tcmalloc, cores, memory, ports, redis, model, containers,
)  # fmt: skip


async def _reach(url: str) -> None:
    await (await connect(url)).aclose()


def _said_by(program: str) -> str:
    return _output([sys.executable, "-c", program])


def _output(command: Sequence[str]) -> str:
    """What a command prints. Raises FileNotFoundError, or SubprocessError with its last line."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(command[0])
    done = subprocess.run(list(command), capture_output=True, text=True, timeout=PROBE_S, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise subprocess.SubprocessError(last)
    return done.stdout.strip()
