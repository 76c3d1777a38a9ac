"""What is drawn: the live table, the demo's waterfall and its proof, numbers, text on a terminal or not."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from diptych.cli import console, demo, figures, waterfall
from diptych.cli.member import Change, Member
from diptych.cli.process import Running
from diptych.cli.watch import LineView, StatusPoll, TableView, members_table
from diptych.cli.waterfall import Bar
from diptych.client import RouterStatus, Trail, WorkerInfo
from diptych.domain.records import Role
from tests.support.fake_router import FakeRouter

TRAIL = Trail(
    decode_worker="decode-0",
    prefill_worker="prefill-0",
    path="disaggregated",
    path_reason="long_prompt",
    num_prompt_tokens=600,
    num_output_tokens=11,
    num_chunks=3,
    kv_bytes=13_824_000,
    channel="grpc",
    queue_s=0.1,
    prefill_s=0.4,
    handoff_s=0.06,
    exposed_s=0.05,
    ttft_s=0.6,
    decode_s=1.0,
)


def drawn(renderable: Any, terminal: bool = False) -> str:
    target = Console(file=io.StringIO(), width=160, force_terminal=terminal, highlight=False)
    target.print(renderable)
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def never() -> Running:
    raise OSError("not today")


def status(**changes: Any) -> RouterStatus:
    decode = WorkerInfo("decode-0", Role.DECODE, 1, "h:1", "toy", 7, 2, 1, 3, 8, 0.25, 0.0125)
    return replace(RouterStatus("router-0", (decode,), 3, 40, True, 0.3, 0.02), **changes)


def test_the_table_joins_what_we_know_of_a_child_and_what_the_router_knows() -> None:
    members = [Member("decode-0", "decode", never), Member("prefill-0", "prefill", never)]
    list(members[1].tick(0.0))
    text = drawn(members_table(members, status()))
    (decode,) = [line for line in text.splitlines() if "decode-0" in line]
    (prefill,) = [line for line in text.splitlines() if "prefill-0" in line]
    assert re.split(r"\s{2,}", decode.strip()) == [
        "decode", "decode-0", "–", "down", "2 + 1", "3/8", "250 ms", "12.5 ms", "0",
    ]  # fmt: skip
    assert re.split(r"\s{2,}", prefill.strip())[4:] == ["–", "–", "–", "–", "0"]
    assert "3 live, 40 finished, TTFT p50 300 ms, TPOT p50 20.0 ms" in text
    assert "store away" in drawn(members_table(members, status(store_available=False)))
    assert "the router does not answer" in drawn(members_table(members, None))


def test_a_pipe_gets_a_line_for_each_change_and_a_terminal_the_table_too() -> None:
    change = Change("decode-0", "was killed by SIGKILL; starting it again in 0.2 s")
    pipe = Console(file=io.StringIO(), width=20)
    with LineView(pipe) as lines:
        lines.note(change)
        lines.note(Change("[x]", "is no markup"))
    assert pipe.file.getvalue() == f"decode-0: {change.what}\n[x]: is no markup\n"  # type: ignore[attr-defined]

    terminal = Console(file=io.StringIO(), width=160, force_terminal=True)
    with TableView(terminal, [Member("decode-0", "decode", never)], status) as table:
        table.note(change)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "was killed by SIGKILL" in shown
    assert "restarts" in shown


def test_the_poll_tells_the_latest_status_and_none_when_nobody_answers() -> None:
    with FakeRouter() as router:
        poll = StatusPoll(router.address)
        with poll:
            while poll.latest is None:
                poll._leave.wait(0.01)
            assert poll.latest.router_id == "router-0"
    gone = StatusPoll("127.0.0.1:1")
    gone.latest = status()
    with gone:
        while gone.latest is not None:
            gone._leave.wait(0.01)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"path": "local", "path_reason": "short_prompt"}, "the path was local (short_prompt)"),
        ({"path": ""}, "the path was unknown"),
        ({"kv_bytes": 0}, "no bytes of KV were read"),
        ({"num_chunks": 2}, "88 prompt tokens were prefilled locally"),
        ({"num_chunks": 2, "num_cached_tokens": 88}, ""),
        ({"fallbacks": {"digest_wrong": 2}}, "there were fallbacks: digest_wrong 2"),
    ],
)
def test_the_demo_says_what_is_missing(changes: dict[str, Any], problem: str) -> None:
    problems = demo.what_is_missing(replace(TRAIL, **changes))
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)


def test_the_demo_shows_each_phase_and_the_proof() -> None:
    text = drawn(demo.trail_table(TRAIL, 160))
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert "100 ms" in rows["queue"]
    assert "600 tokens on prefill-0" in rows["prefill"]
    assert "50.0 ms" in rows["hand-off"]
    assert "exposed of 60.0 ms; 13.2 MiB in 3 chunks over grpc" in rows["hand-off"]
    assert "11 tokens on decode-0" in rows["decode"]
    assert "10 tokens/s" in rows["TPOT"]
    assert demo.proof(TRAIL) == (
        "The KV really crossed: 13824000 bytes in 3 chunks, from prefill-0 to decode-0; "
        "local prefill: 0 tokens."
    )


def test_the_demo_prompt_is_long_enough_to_be_disaggregated() -> None:
    text = demo.files("diptych.cli").joinpath("demo.txt").read_text(encoding="utf-8")
    assert len(text.split()) > 300  # no tokenizer makes fewer tokens than words of this


def test_bars_lie_where_their_time_was() -> None:
    assert waterfall.draw(Bar("x", 0.0, 0.5, ""), 1.0, 8) == "████    "
    assert waterfall.draw(Bar("x", 0.5, 1.0, ""), 1.0, 8) == "    ████"
    assert waterfall.draw(Bar("x", 0.25, 0.3125, ""), 1.0, 8) == "  ▌     "
    assert waterfall.draw(Bar("x", 1.0, 1.0, ""), 1.0, 8) == " " * 8
    assert waterfall.draw(Bar("x", 0.0, 0.0, ""), 0.0, 8) == " " * 8
    assert waterfall.axis(waterfall.bars(TRAIL)) == pytest.approx(1.6)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.integers(1, 80))
def test_a_bar_always_fits_and_shows_what_took_time(
    begin: float, took: float, rest: float, width: int
) -> None:
    bar = Bar("x", begin, begin + took, "")
    cells = waterfall.draw(bar, begin + took + rest, width)
    assert len(cells) == width
    assert (cells.strip() != "") == (bar.end_s > bar.begin_s)


def test_numbers() -> None:
    assert [figures.milliseconds(s) for s in (0.0, 0.0001, 0.00125, 0.0999, 1.5)] == [
        "–", "0.10 ms", "1.2 ms", "99.9 ms", "1500 ms",
    ]  # fmt: skip
    assert [figures.size(n) for n in (0, 1023, 1024, 3 << 20, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5120.0 GiB",
    ]  # fmt: skip
    assert figures.share(3, 8) == "3/8"
    assert figures.share(0, 0) == "–"


def test_a_terminal_gets_no_control_characters_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console.write("\x1b[2Ja\n\tb\x07")
    assert capsys.readouterr().out == "\x1b[2Ja\n\tb\x07"
    monkeypatch.setattr(console, "out", Console(force_terminal=True))
    console.write("\x1b[2Ja\n\tb\x07é\x9b")
    assert capsys.readouterr().out == "[2Ja\n\tbé"
