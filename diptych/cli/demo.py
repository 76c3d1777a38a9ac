"""`diptych demo`: a system of its own, a prompt long enough to be disaggregated, and proof that it was."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from diptych.cli import figures, waterfall
from diptych.cli.assemble import UpOptions, assembled
from diptych.cli.certificates import tls_from_environment
from diptych.cli.console import out
from diptych.cli.leave import LeaveSignals
from diptych.cli.talk import say
from diptych.cli.watch import LineView
from diptych.client import Client, Trail
from diptych.domain.errors import OurError
from diptych.domain.ids import CHUNK_TOKENS

QUESTION: Final = "Explain in two sentences what prefill and decode workers do."
MAX_TOKENS: Final = 96
BAR_CELLS: Final = range(10, 49)
TEXT_CELLS: Final = 80
"""What the columns beside the bars need."""


class NotDisaggregated(OurError):
    """The prompt was answered, but not in the way that the demo is there to show."""


def run_demo(model: str, profile: str) -> None:
    """Raises NotDisaggregated where the KV did not cross, and whatever keeps the system from starting."""
    with assembled(UpOptions(model, profile)) as cluster:
        with LeaveSignals() as leave:
            cluster.start(LineView(out).note, leave.asked)
        text = files("diptych.cli").joinpath("demo.txt").read_text(encoding="utf-8")
        out.print(f"\n{len(text.split())} words on disaggregated inference, then: {QUESTION}\n", markup=False)
        with Client(cluster.router, tls=tls_from_environment()) as client:
            message = {"role": "user", "content": f"{text}\n{QUESTION}"}
            finish = say(client.generate(messages=[message], max_tokens=MAX_TOKENS), [])
        out.print()
        out.print(trail_table(finish.trail, out.width))
        problems = what_is_missing(finish.trail)
        if problems:
            raise NotDisaggregated(f"the KV did not cross as it should: {'; '.join(problems)}")
        out.print(Text(proof(finish.trail), "bold green"), soft_wrap=True)


def local_tokens(trail: Trail) -> int:
    """Prompt tokens that neither lay in a cache nor crossed in a chunk: the decode worker ran them itself."""
    return max(0, trail.num_prompt_tokens - trail.num_cached_tokens - trail.num_chunks * CHUNK_TOKENS)


def what_is_missing(trail: Trail) -> list[str]:
    """Why this request does not count as disaggregated; empty when it does."""
    fallbacks = figures.counts(trail.fallbacks)
    problems = {
        f"the path was {trail.path or 'unknown'} ({trail.path_reason})": trail.path != "disaggregated",
        "no bytes of KV were read": trail.kv_bytes == 0,
        f"{local_tokens(trail)} prompt tokens were prefilled locally": local_tokens(trail) > 0,
        f"there were fallbacks: {fallbacks}": bool(trail.fallbacks),
    }
    return [problem for problem, is_there in problems.items() if is_there]


def proof(trail: Trail) -> str:
    """What shows that the KV crossed."""
    return (
        f"The KV really crossed: {trail.kv_bytes} bytes in {trail.num_chunks} chunks, "
        f"from {trail.prefill_worker} to {trail.decode_worker}; local prefill: {local_tokens(trail)} tokens."
    )


def trail_table(trail: Trail, width: int) -> Table:
    """Each phase with its time, a bar on one time axis, and what belongs to it; then the sums."""
    cells = min(max(width - TEXT_CELLS, BAR_CELLS[0]), BAR_CELLS[-1])
    phases = waterfall.bars(trail)
    total_s = waterfall.axis(phases)
    notes = {
        "queue": "until a prefill worker began",
        "prefill": f"{trail.num_prompt_tokens} tokens on {trail.prefill_worker or trail.decode_worker}",
        "hand-off": (
            f"exposed of {figures.milliseconds(trail.handoff_s)}; "
            f"{figures.size(trail.kv_bytes)} in {trail.num_chunks} chunks over {trail.channel}"
        ),
        "decode": f"{trail.num_output_tokens} tokens on {trail.decode_worker}",
    }
    table = Table(title=f"where {figures.milliseconds(total_s)} went", title_justify="left")
    table.add_column("phase")
    table.add_column("time", justify="right")
    table.add_column("", width=cells, no_wrap=True)
    table.add_column("")
    for phase in phases:
        bar = Text(waterfall.draw(phase, total_s, cells), phase.style)
        took = figures.milliseconds(phase.end_s - phase.begin_s)
        table.add_row(phase.name, took, bar, escape(notes[phase.name]))
    table.add_section()
    per_second = f"{1 / trail.tpot_s:.0f} tokens/s" if trail.tpot_s > 0 else ""
    table.add_row("TTFT", figures.milliseconds(trail.ttft_s), "", "submission to first token")
    table.add_row("TPOT", figures.milliseconds(trail.tpot_s), "", per_second)
    return table
