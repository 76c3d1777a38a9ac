"""Which machine a figure is from, in one line: without it no figure means anything."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path


def cpu_model(cpuinfo: str) -> str:
    """The model name in the text of /proc/cpuinfo; "unknown CPU" where it has none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return "unknown CPU"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> dict[str, str | int | float]:
    """The machine and the moment."""
    cpuinfo = Path("/proc/cpuinfo")
    return {
        "cpu": cpu_model(cpuinfo.read_text(encoding="utf-8")) if cpuinfo.exists() else platform.processor(),
        "cores": num_cores(),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def line(machine: dict[str, str | int | float]) -> str:
    """`describe` for people."""
    return "{cpu}, {cores} cores, torch {torch}, Python {python}, load {load} at start, {date}".format(
        **machine
    )
