"""The curves of `bench.batch` as a picture: throughput, TPOT, and what the memory held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

Curves = Mapping[str, Mapping[str, list[float]]]
_STYLES = {"paged": ("#1f77b4", "o"), "contiguous": ("#d62728", "s")}


def draw(curves: Curves, file: Path, caption: str) -> None:
    """Writes a PNG. `curves` holds lists of equal length by allocator and figure."""
    figure, (rate, tpot, memory) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for allocator, found in curves.items():
        color, marker = _STYLES[allocator]
        rate.plot(found["batch"], found["tokens_per_s"], color=color, marker=marker, label=allocator)
        tpot.plot(found["batch"], found["tpot_ms"], color=color, marker=marker, label=allocator)
        for what, style in (("filled", "-"), ("reserved", "--"), ("stranded", ":")):
            shares = [100 * share for share in found[what]]
            memory.plot(found["batch"], shares, style, color=color, label=f"{allocator}, {what}")
    titles = ((rate, "throughput", "tokens/s"), (tpot, "time per output token", "ms"),
              (memory, "the pool", "% of its tokens"))  # fmt: skip
    for axes, title, unit in titles:
        axes.set(title=title, ylabel=unit, xlabel="requests at a time", ylim=(0, None))
        axes.axvline(32, color="grey", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.supxlabel(caption, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)
