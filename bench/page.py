"""Figures into a page: what lies between two markers is replaced by the tables of a benchmark's JSON.

python -m bench.page docs/engine.md engine=FILE.json batch=FILE.json

<!-- figures: engine -->      everything between these two lines is rewritten
<!-- end of figures -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import machine

_END = "<!-- end of figures -->"


def with_figures(page: str, name: str, tables: str) -> str:
    """`page` with `tables` between the markers of `name`. Raises LookupError when it has none."""
    begin = f"<!-- figures: {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(_END)}", re.DOTALL)
    if not pattern.search(page):
        raise LookupError(f"no {begin} … {_END}")
    return pattern.sub(lambda _: f"{begin}\n{tables.strip()}\n{_END}", page)


def tables_of(document: dict[str, Any]) -> str:
    """The JSON that a benchmark wrote, as Markdown."""
    parts = [f"Measured on {machine.line(document['machine'])}{', quick form' if document['quick'] else ''}."]
    rows: list[dict[str, Any]] = document["rows"]
    aimed = [row for row in rows if row["aim"] is not None or row["stretch"] is not None]
    if aimed:
        parts.append(_table(("row", "against", "ratio", "aim (stretch)", "met"), map(_aimed, aimed)))
    parts += _side_by_side(rows)
    for sheet in document["sheets"]:
        lines = ([_cell(entry) for entry in line] for line in sheet["lines"])
        parts.append(f"**{sheet['title']}**\n\n{_table(sheet['columns'], lines)}")
        if sheet["note"]:
            parts.append(f"{sheet['note']}.")
    parts += document["notes"]
    return "\n\n".join(parts)


def _aimed(row: dict[str, Any]) -> list[str]:
    sign = "≥" if row["better"] == "higher" else "≤"
    aim = f"{sign} {row['aim']:g}" if row["aim"] is not None else "–"
    stretch = f" ({row['stretch']:g})" if row["stretch"] is not None else ""
    met = {True: "yes", False: "**no**", None: "–"}[row["met"]]
    return [row["name"], row["reference_name"], row["why"] or _ratio(row), aim + stretch, met]


def _ratio(row: dict[str, Any]) -> str:
    interval = row["ratio_interval"]
    shown = f"{row['ratio']:.2f}"
    return f"{shown} ({interval[0]:.2f}–{interval[1]:.2f})" if interval else shown


def _side_by_side(rows: list[dict[str, Any]]) -> list[str]:
    """One table for each unit: a line for each case, a column for each reference."""
    found = []
    for unit in dict.fromkeys(row["unit"] for row in rows):
        chosen = [row for row in rows if row["unit"] == unit]
        references = list(dict.fromkeys(row["reference_name"] for row in chosen))
        cases = list(dict.fromkeys(row["name"] for row in chosen))
        cells = {(row["name"], row["reference_name"]): _cell(row["reference"]) for row in chosen}
        ours = {row["name"]: _cell(row["ours"]) for row in chosen}
        lines = ([case, ours[case], *(cells.get((case, name), "") for name in references)] for case in cases)
        found.append(_table((unit, "ours", *references), lines))
    return found


def _cell(value: float | str | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)])


def main(arguments: list[str]) -> int:
    """Exit status 0, or a message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("figures", nargs="+", metavar="NAME=FILE")
    found = parser.parse_args(arguments)
    page = found.page.read_text(encoding="utf-8")
    for entry in found.figures:
        name, _, file = entry.partition("=")
        try:
            page = with_figures(page, name, tables_of(json.loads(Path(file).read_text(encoding="utf-8"))))
        except (LookupError, OSError, ValueError) as error:
            parser.error(f"{entry}: {error}")
    found.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
