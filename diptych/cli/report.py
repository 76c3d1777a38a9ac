"""`diptych status` and `diptych models`: what a router knows, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diptych.cli import figures
from diptych.client import ModelInfo, RouterStatus


def print_status(console: Console, address: str, status: RouterStatus) -> None:
    """The router in two lines, then a row for each worker."""
    store = "answers" if status.store_available else "[red]does not answer[/]"
    console.print(f"router {escape(status.router_id)} at {address}: store {store}")
    ttft, tpot = figures.milliseconds(status.ttft_p50_s), figures.milliseconds(status.tpot_p50_s)
    console.print(f"{status.num_live} live, {status.num_finished} finished, TTFT p50 {ttft}, TPOT p50 {tpot}")
    if status.fallbacks:
        console.print(f"fallbacks: {escape(figures.counts(status.fallbacks))}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("role", "id", "address", "run + wait", "blocks", "TTFT", "TPOT"):
        table.add_column(name, no_wrap=True)
    for worker in status.workers:
        table.add_row(
            worker.role.value if worker.role else "?",
            escape(worker.worker_id),
            worker.address,
            f"{worker.num_running} + {worker.num_waiting}",
            figures.share(worker.blocks_used, worker.blocks_total),
            figures.milliseconds(worker.ttft_s),
            figures.milliseconds(worker.tpot_s),
        )
    console.print(table)
    for worker in status.workers:
        if worker.counters:
            console.print(f"{escape(worker.worker_id)}: {escape(figures.counts(worker.counters))}")


def status_json(status: RouterStatus) -> str:
    """Everything, for programs. Ids that exceed what JSON readers hold exactly are strings."""
    workers = [
        {**asdict(worker), "role": worker.role.value if worker.role else None, "epoch": str(worker.epoch)}
        for worker in status.workers
    ]
    return json.dumps({**asdict(status), "workers": workers}, indent=2)


def print_models(console: Console, models: Sequence[ModelInfo]) -> None:
    """A row for each model."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "context", "fingerprint"):
        table.add_column(name)
    for model in models:
        table.add_row(escape(model.name), str(model.max_context), model.fingerprint)
    console.print(table)
