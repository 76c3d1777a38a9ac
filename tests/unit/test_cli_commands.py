"""The commands that speak to a router, from command line to exit status, against a scripted one."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.cli import talk
from diptych.cli.main import main
from diptych.client import Client
from diptych.domain import errors
from diptych.v1 import common_pb2, router_pb2, worker_pb2
from tests.support.fake_router import DEADLINE_S, HOLD, FakeRouter, failed, last, pieces, worker

TRAIL: dict[str, Any] = {
    "path": common_pb2.PREFILL_PATH_DISAGGREGATED,
    "prefill_worker": "prefill-0",
    "decode_worker": "decode-0",
    "kv_bytes": 3 << 20,
    "num_output_tokens": 3,
    "ttft_s": 0.25,
    "decode_s": 0.02,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("DIPTYCH_ROUTER", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRouter]:
    with FakeRouter() as fake:
        monkeypatch.setenv("DIPTYCH_ROUTER", fake.address)
        yield fake


def run(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_generate_prints_the_text_alone_and_what_it_took_on_stderr(
    router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router.scripts = [[*pieces("a\tb ", "[bold]", "\x1b[31m"), last("STOP", 3, **TRAIL)]]
    assert run("generate", "Once", "--max-tokens", "9", "--seed", "4", "--stop", "x", "--stop", "y") == 0
    printed = capsys.readouterr()
    assert printed.out == "a\tb [bold]\x1b[31m\n"
    assert printed.err == (
        "3 tokens (stop), TTFT 250 ms, TPOT 10.0 ms, prefill on prefill-0, 3.0 MiB of KV to decode-0\n"
    )
    (request,) = router.requests
    assert (request.prompt, request.params.max_tokens, request.params.seed) == ("Once", 9, 4)
    assert list(request.params.stop) == ["x", "y"]


def test_a_prompt_may_come_from_standard_input(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    router.scripts = [[last()]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("long\nprömpt".encode())))
    assert run("generate", "-") == 0
    assert router.requests[0].prompt == "long\nprömpt"
    assert not router.requests[0].params.HasField("seed")


def test_standard_input_that_is_no_text_is_refused(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    assert run("generate", "-") == 1
    assert capsys.readouterr().err == "diptych: prompt: standard input is not UTF-8 at byte 3\n"


def test_a_file_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(given: str) -> None:
        raise OSError(28, "No space left on device", "/tmp/x")

    monkeypatch.setattr(talk, "router_at", full)
    assert run("models") == 1
    assert capsys.readouterr().err == "diptych: [Errno 28] No space left on device: '/tmp/x'\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            [errors.InvalidField("params.top_p", "must be from 0 to 1, is 2")],
            ["params.top_p: must be from 0 to 1"],
        ),
        ([errors.TooLarge("9000 tokens, 8192 fit")], ["9000 tokens, 8192 fit", "shorten the prompt"]),
        ([errors.UnknownModel("nobody serves 'x'")], ["nobody serves 'x'", "diptych models"]),
        ([errors.Overloaded("full", retry_after_s=2.5)], ["full", "try again in 2.5 s"]),
        ([*pieces("He"), failed("PeerLost", "decode-0 died")], ["decode-0 died", "diptych status"]),
        (pieces("He"), ["before its last message", "diptych status"]),
    ],
)
def test_an_error_is_one_or_two_red_lines(
    router: FakeRouter, capsys: pytest.CaptureFixture[str], script: Any, said: list[str]
) -> None:
    router.scripts = [script]
    assert run("generate", "Once") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line


def test_when_nothing_runs_the_advice_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "Once"], ["chat"], ["status"], ["models"]):
        assert run(*command) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == (
            "diptych: no router is known: start one with `diptych up`, or name one with --router HOST:PORT\n"
        )


def test_a_router_that_is_gone_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--router", "127.0.0.1:1") == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("diptych: the router at 127.0.0.1:1 does not answer: ")
    assert "diptych up" in second


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "x", "--max-tokens", "many"],
        ["nonsense"],
        ["up", "--profile", "odd"],
        ["status", "--no"],
    ],
)
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "Usage: diptych" in capsys.readouterr().err


def test_ctrl_c_cancels_on_the_router(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    router.scripts = [[*pieces("He"), HOLD]]
    monkeypatch.setattr(talk, "write", interrupting(talk.write))
    assert run("generate", "Once") == 130
    assert router.cancelled.wait(DEADLINE_S)
    assert "Traceback" not in capsys.readouterr().err


def interrupting(write: Callable[[str], None]) -> Callable[[str], None]:
    """As if the user pressed Ctrl-C when the first text of an answer is on the screen."""
    answers = []

    def then_interrupt(text: str) -> None:
        write(text)
        if not answers:
            answers.append(text)
            raise KeyboardInterrupt

    return then_interrupt


class Typing:
    """A user at the prompt: lines, and at their end what ends the chat."""

    def __init__(self, *lines: str, end: type[BaseException] = EOFError) -> None:
        self.lines = list(lines)
        self.end = end

    def __call__(self) -> str:
        if not self.lines:
            raise self.end
        return self.lines.pop(0)


def contents(request: router_pb2.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_chat_remembers_and_forgets(router: FakeRouter, end: type[BaseException]) -> None:
    router.scripts = [[*pieces("Hel", "lo"), last()], [*pieces("Fine"), last()], [*pieces("New"), last()]]
    with Client(router.address) as client:
        talk.converse(client, "toy", 7, 0.5, Typing("Hi", "", " How? ", "/new", "Again", end=end))
    first, second, third = router.requests
    assert contents(first) == [("user", "Hi")]
    assert contents(second) == [("user", "Hi"), ("assistant", "Hello"), ("user", "How?")]
    assert contents(third) == [("user", "Again")]
    assert (first.model, first.params.max_tokens, first.params.temperature) == ("toy", 7, 0.5)


def test_ctrl_c_in_an_answer_cancels_it_and_keeps_the_chat(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    router.scripts = [[*pieces("Hel"), HOLD], [*pieces("Fine"), last()]]
    monkeypatch.setattr(talk, "write", interrupting(talk.write))
    with Client(router.address) as client:
        talk.converse(client, "", 7, 0.5, Typing("Hi", "More"))
    assert router.cancelled.wait(DEADLINE_S)
    assert contents(router.requests[1]) == [("user", "Hi"), ("assistant", "Hel"), ("user", "More")]
    assert "cancelled" in capsys.readouterr().err


def test_an_answer_that_fails_ends_neither_the_chat_nor_its_order(
    router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router.scripts = [[errors.Overloaded("full")], [*pieces("Fine"), last()]]
    with Client(router.address) as client:
        talk.converse(client, "", 7, 0.5, Typing("Hi", "Hi again"))
    assert "try again in 1 s" in capsys.readouterr().err
    assert contents(router.requests[1]) == [("user", "Hi again")]


def test_chat_greets_with_what_is_served(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("chat") == 0
    assert capsys.readouterr().out.startswith(f"toy at {router.address}. ")


def test_status_as_tables_and_as_json(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    load = {"num_running": 2, "num_waiting": 1, "blocks_free": 5, "blocks_total": 8, "tpot_s": 0.0125}
    router.status.workers.append(worker("decode-0", worker_pb2.ROLE_DECODE, **load))
    router.status.workers[0].counters.add(reason="stale", count=2)
    router.status.fallbacks.add(reason="no_prefill_worker", count=3)

    assert run("status") == 0
    table = capsys.readouterr().out
    for part in (
        router.address,
        "decode-0",
        "2 + 1",
        "3/8",
        "12.5 ms",
        "no_prefill_worker 3",
        "decode-0: stale 2",
    ):
        assert part in table

    assert run("status", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fallbacks"] == {"no_prefill_worker": 3}
    assert told["workers"][0]["role"] == "decode"
    assert told["workers"][0]["epoch"] == "7"


def test_models(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models") == 0
    printed = capsys.readouterr().out
    assert "toy" in printed
    assert "4096" in printed


def test_what_nobody_expected_is_two_lines_and_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(given: str) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(talk, "router_at", broken)
    assert run("models") == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "diptych: unexpected ZeroDivisionError: by nothing"
    (file,) = tmp_path.glob("diptych-bug-*.txt")
    assert second.endswith(str(file))
    assert "Traceback" in file.read_text(encoding="utf-8")
