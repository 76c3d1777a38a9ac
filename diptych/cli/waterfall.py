"""Where a request's time went, as bars on one time axis. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.client import Trail

BLOCKS = " ▏▎▍▌▋▊▉█"
"""A cell filled from the left in eighths."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase, in seconds from submission."""

    name: str
    begin_s: float
    end_s: float
    style: str


def bars(trail: Trail) -> list[Bar]:
    """The phases of a request, in order. Of the hand-off only what nothing hid has a place of its own."""
    prefilled_s = trail.queue_s + trail.prefill_s
    return [
        Bar("queue", 0.0, trail.queue_s, "yellow"),
        Bar("prefill", trail.queue_s, prefilled_s, "cyan"),
        Bar("hand-off", max(0.0, trail.ttft_s - trail.exposed_s), trail.ttft_s, "magenta"),
        Bar("decode", trail.ttft_s, trail.ttft_s + trail.decode_s, "green"),
    ]


def draw(bar: Bar, total_s: float, width: int) -> str:
    """`bar` on an axis of `width` cells for `total_s` seconds; whatever took time shows at least a sliver."""
    if total_s <= 0 or bar.end_s <= bar.begin_s:
        return " " * width
    eighths = 8 * width
    begin = min(round(bar.begin_s / total_s * eighths), eighths - 1)
    end = max(begin + 1, min(round(bar.end_s / total_s * eighths), eighths))
    # A cell fills from the left only: the begin is rounded down to a whole cell.
    first, last = begin // 8, end
    full, rest = divmod(last - 8 * first, 8)
    return (" " * first + BLOCKS[8] * full + (BLOCKS[rest] if rest else "")).ljust(width)


def axis(phases: Sequence[Bar]) -> float:
    """Seconds that the axis must hold."""
    return max((bar.end_s for bar in phases), default=0.0)
