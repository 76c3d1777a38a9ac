"""Compilation: to machine code on first use, kept on disk in the user's cache, and run without the GIL."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import config

from diptych.engine.model_cache import cache_dir

P = ParamSpec("P")
R = TypeVar("R")


def _keep_on_disk() -> bool:
    """Whether compiled kernels can be kept, in a folder that is named after the kernels' source.

    numba would notice a change in a kernel's own file only, not in what it calls.
    """
    settings = vars(config)
    if not settings["CACHE_DIR"]:  # NUMBA_CACHE_DIR is respected
        digest = hashlib.blake2b(digest_size=8)
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        settings["CACHE_DIR"] = str(cache_dir() / "kernels" / digest.hexdigest())
    try:
        Path(settings["CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only cache costs time, nothing else
        return False
    return os.access(settings["CACHE_DIR"], os.W_OK)


_OPTIONS: dict[str, Any] = {"nogil": True, "cache": _keep_on_disk(), "error_model": "numpy"}


def part(function: Callable[P, R]) -> Callable[P, R]:
    """A function for kernels, compiled as if its text stood where it is called: what is constant there is
    constant here."""
    return cast("Callable[P, R]", numba.njit(inline="always", error_model="numpy")(function))


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` for the thread that calls it.

    Captured variables are constants; none may be a compiled function, which would never be found on disk.
    """
    return cast("Callable[P, R]", numba.njit(**_OPTIONS)(function))


def spread_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function`, whose `numba.prange` loops run on numba's threads."""
    return cast("Callable[P, R]", numba.njit(**_OPTIONS, parallel=True)(function))
