"""NIXL as it is installed here, and what UCX, which moves its bytes, is told.

`nixl-cu12` and `nixl-cu13` are the same library for two CUDA versions; both work without a GPU. Its bindings
are used directly: NIXL's own Python class cannot say how long the progress thread may sleep, and with its 0
that thread takes a whole core (seen in 1.5.1).

Both libraries are told to be quiet and to leave this process alone (no signal handlers, no patched `mmap`,
no files or threads for a debugger) unless the environment says otherwise: whatever goes wrong comes as an
error. Loading takes 0.2 s.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

from diptych.domain.errors import InvalidField

Transport = Literal["auto", "shm", "tcp", "rdma"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

PACKAGES = ("nixl_cu12", "nixl_cu13")

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_VFS_ENABLE": "n",
    # All memory is registered by hand. The hooks that watch for freed memory rewrite functions of libc, and
    # take 0.4 s of a start.
    "UCX_MEM_EVENTS": "n",
}

WITHOUT_TCP = "TLS=^tcp"

_RDMA = Path("/sys/class/infiniband")


def installed() -> str:
    """The package that is there, or empty."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name)), "")


@cache
def bindings() -> ModuleType:
    """NIXL's C++ interface. Raises InvalidField when it is not installed or does not load."""
    name = installed()
    if not name:
        raise InvalidField("kv channel", "nixl is not installed (pip install 'diptych[nixl]')")
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    raises = logging.raiseExceptions
    try:
        return importlib.import_module(f"{name}._bindings")
    except ImportError as failure:
        raise InvalidField("kv channel", f"{name} does not load: {failure}") from failure
    finally:
        logging.raiseExceptions = raises  # the package turns it off for the whole process


def has_rdma() -> bool:
    """Whether this machine has RDMA devices."""
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def ucx_configurations(transport: Transport, host: str, rdma: bool) -> list[str]:
    """What UCX is told, as NIXL's `engine_config`; the first that starts is taken.

    With RDMA, TCP is left out: a read over it needs its owner's help (`nixl_place` says why that is bad).
    Without, only processes of one host can be reached, so nothing listens on any other address.
    """
    loopback = "NET_DEVICES=lo"
    match transport:
        case "auto":
            return [WITHOUT_TCP, loopback] if rdma else [loopback]
        case "shm":
            return [loopback]
        case "rdma":
            return [WITHOUT_TCP]
        case "tcp":
            return [f"TLS=tcp,{loopback}" if host in ("127.0.0.1", "localhost", "::1") else "TLS=tcp"]
