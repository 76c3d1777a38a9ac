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
    if not config.CACHE_DIR:  # NUMBA_CACHE_DIR is respected
        digest = hashlib.blake2b(digest_size=8)
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        config.CACHE_DIR = str(cache_dir() / "kernels" / digest.hexdigest())
    try:
        Path(config.CACHE_DIR).mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only cache costs time, nothing else
        return False
    return os.access(config.CACHE_DIR, os.W_OK)


_OPTIONS: dict[str, Any] = {"nogil": True, "cache": _keep_on_disk(), "error_model": "numpy"}


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` for the thread that calls it."""
    return cast("Callable[P, R]", numba.njit(**_OPTIONS)(function))


def spread_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function`, whose `numba.prange` loops run on numba's threads."""
    return cast("Callable[P, R]", numba.njit(**_OPTIONS, parallel=True)(function))
