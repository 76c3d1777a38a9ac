"""`diptych audit`: what every process and the store hold, by whom, for how long, and what should not be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diptych.cli import figures
from diptych.cli.census import Census, Member, Place, take
from diptych.cli.net import links_table
from diptych.cli.verdict import Finding, findings, lasting
from diptych.store.audit import ShardAudit

SETTLE_S: Final = 1.5
"""Between the two looks: a few heartbeats, and longer than a settled request takes to be gone everywhere."""


async def examine(place: Place) -> tuple[Census, list[Finding]]:
    """Looks, and looks again where something seems wrong; gives the last look and what lasted."""
    census = await take(place)
    first = findings(census)
    if not first:
        return census, []
    await asyncio.sleep(SETTLE_S)
    census = await take(place)
    return census, lasting(first, findings(census))


def print_audit(console: Console, census: Census, found: Sequence[Finding]) -> None:
    """Tables of what there is, and below them, in red, what should not be."""
    wrong = {(finding.where, finding.what) for finding in found}
    console.print(_members_table(census.members))
    held = _held_table(census.members, wrong)
    if held.row_count:
        console.print(held)
    if any(member.account and member.account.links for member in census.members):
        console.print(links_table(census.members))
    if census.store is None:
        console.print("[yellow]the store was not asked: name it with --redis-url[/]")
    else:
        console.print(_store_table(census.store))
        if census.store.truncated:
            console.print("[yellow]the store has more keys than were looked at[/]")
    for finding in found:
        console.print(f"[red]{escape(finding.where)}: {escape(finding.what)}: {escape(finding.why)}[/]")
    console.print("[red]these should not be[/]" if found else "[green]nothing is held that should not be[/]")


def audit_json(census: Census, found: Sequence[Finding]) -> str:
    """Everything, for programs. Epochs, which exceed what JSON readers hold exactly, are strings."""
    members = [_member_json(member) for member in census.members]
    store = msgspec.to_builtins(census.store)
    return json.dumps({"members": members, "store": store, "findings": [asdict(f) for f in found]}, indent=2)


def _member_json(member: Member) -> dict[str, Any]:
    told = {**asdict(member), "role": member.role.value if member.role else None, "epoch": str(member.epoch)}
    if told["account"] is not None:
        told["account"]["epoch"] = str(told["account"]["epoch"])
        for link in told["account"]["links"]:
            link["epoch"] = str(link["epoch"])
    return told


def _members_table(members: Sequence[Member]) -> Table:
    table = Table(title="who", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("role", "id", "run + wait", "free", "cached", "owned", "total", "slots", "held", "leaked"):
        table.add_column(name, justify="left" if name in ("role", "id") else "right", no_wrap=True)
    for member in members:
        account = member.account
        row = [member.role.value if member.role else "?", escape(member.worker_id)]
        if account is None:
            live = f"{member.num_live} live" if not member.problem else "[red]no answer[/]"
            table.add_row(*row, live, *["–"] * 7)
            continue
        leaked = f"[red]{account.leaked}[/]" if account.leaked else "0"
        blocks = [str(count) if account.blocks[3] else "–" for count in account.blocks]
        table.add_row(
            *row, f"{account.num_running} + {account.num_waiting}", *blocks,
            figures.share(*account.slots), str(account.num_held), leaked,
        )  # fmt: skip
    return table


def _held_table(members: Sequence[Member], wrong: set[tuple[str, str]]) -> Table:
    table = Table(title="holds", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "kind", "name", "for", "blocks", "since", "ends in"):
        table.add_column(name, overflow="fold")
    for member in members:
        for held in member.account.held if member.account else ():
            style = "red" if (member.worker_id, f"{held.kind} {held.name}") in wrong else ""
            ends = "–" if held.ends_in_s is None else f"{held.ends_in_s:.1f} s"
            table.add_row(
                escape(member.worker_id), held.kind, escape(held.name), escape(held.owner or "–"),
                str(held.num_blocks or "–"), f"{held.age_s:.1f} s", ends, style=style,
            )  # fmt: skip
    return table


def _store_table(audit: ShardAudit) -> Table:
    table = Table(title="store", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("what", "how many", "of them"):
        table.add_column(name, overflow="fold")
    details = {
        "request": figures.counts(dict(audit.num_requests)),
        "chunk": figures.counts(dict(audit.locations)),
    }
    for kind, count in sorted(audit.kinds.items()):
        table.add_row(f"{kind} keys", str(count), escape(details.get(kind, "")))
    if audit.foreign:
        table.add_row("foreign keys", str(len(audit.foreign)), "", style="red")
    for bus in audit.buses:
        claims = ", ".join(f"{c.request_id} by {c.consumer} since {c.idle_s:.1f} s" for c in bus.claims)
        row = f"{bus.num_waiting} waiting, {bus.num_claims} claimed"
        table.add_row(escape(f"bus of {bus.cell}"), row, escape(claims))
    return table
