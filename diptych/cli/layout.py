"""What `diptych up` starts: from its options to one command line and environment for each child. Pure.

    router-0                 the front door, on the port that was asked for
    cache-0                  chunks in host memory
    prefill-0 … prefill-N    decode-0 … decode-N    both-0 … both-N

Ids stay the same over restarts of a child; its epoch tells the restarts apart. Engine workers share the
cores, each with threads that sleep while they wait: one that spins would take its core from the other phase.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Final

from diptych.domain.errors import InvalidField
from diptych.domain.records import Role

LOOPBACK: Final = "127.0.0.1"

MODULES: Final = {
    Role.ROUTER: "services.router",
    Role.CACHE: "services.cache",
    Role.PREFILL: "services.prefill",
    Role.DECODE: "services.decode",
    Role.BOTH: "services.decode",
}


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """What is to run. Raises InvalidField when that can't serve a request."""

    model: str
    """Where its files are: a local directory, or "toy"."""
    model_name: str
    """What it is served as."""
    redis_url: str
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    router_port: int = 0
    """0: a free one."""
    profile: str = "fast"
    threshold_tokens: int | None = None
    """Longest uncached rest that decode prefills itself; None: the service's own default."""
    shard: str = "main"
    id_suffix: str = ""
    """Keeps apart the workers of several machines on one store."""
    router_secret: str = field(default="", repr=False)
    """Signs resume tokens; empty: the routers of the store agree on one."""
    cores: int = 1
    preload: str = ""
    """The allocator that engine workers preload; empty: the system's own."""
    openmp: str = ""
    """The OpenMP that engine workers of several threads preload; empty: whatever each library brings."""

    def __post_init__(self) -> None:
        for name, count in (
            ("prefill", self.num_prefill),
            ("decode", self.num_decode),
            ("both", self.num_both),
        ):
            if not 0 <= count <= 256:
                raise InvalidField(name, f"must be from 0 to 256, is {count}")
        if self.num_decode + self.num_both == 0:
            raise InvalidField(
                "decode", "no worker would decode: ask for at least one of --decode and --both"
            )
        if not 0 <= self.router_port <= 65535:
            raise InvalidField("port", f"must be from 0 to 65535, is {self.router_port}")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: `arguments` follow `python -m module`, `environment` is added to ours."""

    role: Role
    worker_id: str
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


def children(layout: ClusterLayout) -> list[ChildSpec]:
    """Every service, in the order in which they are started. The store is not among them."""
    workers = [
        *_named(Role.PREFILL, layout.num_prefill, layout),
        *_named(Role.DECODE, layout.num_decode, layout),
        *_named(Role.BOTH, layout.num_both, layout),
    ]
    router = _child(Role.ROUTER, 0, layout, f"{LOOPBACK}:{layout.router_port}")
    return [*workers, _child(Role.CACHE, 0, layout), router]


def _named(role: Role, count: int, layout: ClusterLayout) -> list[ChildSpec]:
    return [_child(role, i, layout) for i in range(count)]


def _child(role: Role, number: int, layout: ClusterLayout, listen: str = f"{LOOPBACK}:0") -> ChildSpec:
    worker_id = f"{role.value}-{number}{layout.id_suffix}"
    flags = {
        "--shard": layout.shard,
        "--worker-id": worker_id,
        "--listen": listen,
    }
    is_engine = role.prefills or role.decodes
    environment = {"DIPTYCH_REDIS_URL": layout.redis_url}  # may hold a password: not for everyone's `ps`
    if role is Role.ROUTER and layout.router_secret:
        environment["DIPTYCH_SECRET"] = layout.router_secret
    if role is not Role.CACHE:
        flags |= {"--model": layout.model, "--model-name": layout.model_name}
    if is_engine:
        flags |= {"--profile": layout.profile, "--threads": str(_threads(layout))}
        environment |= _engine_environment(layout)
    if role.decodes:
        flags["--role"] = role.value
        if layout.threshold_tokens is not None:
            flags["--threshold-tokens"] = str(layout.threshold_tokens)
    arguments = tuple(part for flag in flags.items() for part in flag)
    return ChildSpec(role, worker_id, MODULES[role], arguments, environment)


def _threads(layout: ClusterLayout) -> int:
    """Threads of one engine worker. `exact` keeps its promise at one thread only."""
    num_engines = layout.num_prefill + layout.num_decode + layout.num_both
    return 1 if layout.profile == "exact" else max(1, layout.cores // num_engines)


def _engine_environment(layout: ClusterLayout) -> dict[str, str]:
    threads = _threads(layout)
    environment = {"OMP_NUM_THREADS": str(threads)}
    libraries = [layout.preload]
    if threads == 1:
        # Three names of one wish, for the OpenMP of GNU, LLVM and Intel.
        environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    else:
        # A step has 150 parallel regions: to sleep between two of them costs more than most of them take.
        # A millisecond of waiting awake reaches from one to the next, not from one step to the next.
        environment |= {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
        # torch brings a copy of its own, numba takes the system's: two pools would wait on the same cores.
        libraries.append(layout.openmp)
    if any(libraries):
        environment["LD_PRELOAD"] = ":".join(filter(None, libraries))
    return environment


def command(spec: ChildSpec, parent_pid: int) -> list[str]:
    """The argument list that starts `spec` so that it can't outlive the process `parent_pid`."""
    return [sys.executable, "-m", "diptych.cli.child", str(parent_pid), spec.module, *spec.arguments]


def pinned(spec: ChildSpec, address: str) -> ChildSpec:
    """The same child, listening on `address` from now on."""
    arguments = list(spec.arguments)
    arguments[arguments.index("--listen") + 1] = address
    return ChildSpec(spec.role, spec.worker_id, spec.module, tuple(arguments), spec.environment)
