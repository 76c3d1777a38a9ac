"""`diptych doctor`: what this machine offers, and what each lack costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diptych.cli import checks
from diptych.cli.checks import Finding, State

SHOWN: Final = {State.OK: "[green]ok[/]", State.LACKS: "[yellow]lacks[/]", State.BROKEN: "[red]broken[/]"}


def examine() -> list[Finding]:
    """Runs every check."""
    return [check() for check in checks.ALL]


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """A row for each finding, and below them the verdict."""
    table = Table()
    for name in ("", "state", "found", "costs you"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, SHOWN[finding.state], escape(finding.found), escape(finding.cost))
    console.print(table)
    console.print(verdict(findings), markup=False)


def verdict(findings: Sequence[Finding]) -> str:
    """One line: whether it will run here."""
    names = [finding.name for finding in findings if finding.state is State.BROKEN]
    if names:
        return f"Diptych can't run here: {', '.join(names)}"
    lacks = [finding.name for finding in findings if finding.state is State.LACKS]
    return "Diptych runs here" + (f"; what could be better: {', '.join(lacks)}" if lacks else "")


def findings_json(findings: Sequence[Finding]) -> str:
    """Everything, for programs."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def is_broken(findings: Sequence[Finding]) -> bool:
    """Whether something essential lacks."""
    return any(finding.state is State.BROKEN for finding in findings)
