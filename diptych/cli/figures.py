"""Numbers as people read them."""

from __future__ import annotations


def milliseconds(seconds: float) -> str:
    """Milliseconds with three digits or so; a dash for 0, which means that there is nothing to tell."""
    if seconds <= 0:
        return "–"
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def share(used: int, total: int) -> str:
    """`used/total`, or a dash where there is no total."""
    return f"{used}/{total}" if total else "–"


def counts(counters: dict[str, int]) -> str:
    """`name 3, other 1`, by name."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counters.items()))
