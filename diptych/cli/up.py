"""`diptych up`: start, announce, watch until somebody says stop."""

from __future__ import annotations

import time

from diptych.cli import whereabouts
from diptych.cli.assemble import UpOptions, assembled
from diptych.cli.cluster import TICK_S, Cluster
from diptych.cli.console import out
from diptych.cli.leave import LeaveSignals
from diptych.cli.watch import LineView, StatusPoll, TableView, View
from diptych.domain.errors import Cancelled


def run_up(options: UpOptions) -> None:
    """Runs until SIGINT, SIGTERM or SIGHUP, and leaves nothing. Raises what keeps it from starting."""
    with LeaveSignals() as leave, assembled(options) as cluster:
        try:
            cluster.start(LineView(out).note, leave.asked)
            store = options.redis_url or next(m.address for m in cluster.members if m.role == "store")
            with whereabouts.announced(cluster.router, store, options.shard) as problem:
                _watch(cluster, leave, problem)
        except Cancelled:
            pass  # stopped before it was ready: that is no failure
        out.print("stopping …")
        cluster.stop(hurry=leave.urged)


def _watch(cluster: Cluster, leave: LeaveSignals, problem: str) -> None:
    attempt = f"`diptych chat --router {cluster.router}` ({problem})" if problem else "`diptych chat`"
    out.print(f"router listening on {cluster.router}: try {attempt}", markup=False, soft_wrap=True)
    with StatusPoll(cluster.router) as poll:
        view: View = (
            TableView(out, cluster.members, lambda: poll.latest) if out.is_terminal else LineView(out)
        )
        with view:
            while not leave.asked():
                for change in cluster.tick(time.monotonic()):
                    view.note(change)
                time.sleep(TICK_S)
