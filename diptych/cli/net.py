"""`diptych net`: how far each decode worker is from the prefill workers that it reads KV from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.markup import escape
from rich.table import Table

from diptych.cli import figures
from diptych.cli.census import Member
from diptych.domain.records import Link


def links_table(members: Sequence[Member]) -> Table:
    """A row for each link, red where it is past its worker's bound."""
    table = Table(title="links", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("decode", "prefill", "channel", "round trip", "bound", "bandwidth", "measured", ""):
        table.add_column(name, no_wrap=True)
    for member, link, bound_s in _links(members):
        measured = f"{link.age_s:.0f} s ago" if link.rtt_s else "not yet"
        speed = f"{figures.size(round(link.bytes_per_s))}/s" if link.bytes_per_s else "–"
        table.add_row(
            escape(member.worker_id), escape(link.worker_id), link.channel or "–",
            microseconds(link.rtt_s), microseconds(bound_s), speed, measured, verdict(link),
            style="red" if link.too_slow else "",
        )  # fmt: skip
    return table


def links_json(members: Sequence[Member]) -> str:
    """Everything, for programs."""
    links = [
        {"decode_worker": member.worker_id, **asdict(link), "epoch": str(link.epoch), "max_rtt_s": bound_s}
        for member, link, bound_s in _links(members)
    ]
    return json.dumps(links, indent=2)


def verdict(link: Link) -> str:
    """What follows from a link's round trip."""
    if not link.too_slow:
        return "ok" if link.rtt_s else ""
    return "too slow" if link.used else "too slow, not used"


def microseconds(seconds: float) -> str:
    """Microseconds with a digit more where they are few; a dash for 0."""
    us = seconds * 1e6
    return "–" if us <= 0 else f"{us:.0f} µs" if us >= 10 else f"{us:.3g} µs"


def _links(members: Iterable[Member]) -> Iterator[tuple[Member, Link, float]]:
    for member in members:
        if member.account is not None:
            for link in member.account.links:
                yield member, link, member.account.max_rtt_s
