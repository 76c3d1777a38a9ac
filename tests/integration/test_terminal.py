"""The commands as a user at a terminal sees them: the live table, and a chat that Ctrl-C interrupts."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.client import Client
from tests.support.running_up import DIPTYCH, RunningUp, environment, marked, wait_until
from tests.support.terminal import Terminal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CTRL_C = "\x03"
CTRL_D = "\x04"


def test_up_draws_its_table_and_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    env = environment(tmp_path)
    with Terminal([*DIPTYCH, "up", "--model", "toy"], env) as terminal:
        terminal.wait_for("router listening on ")
        terminal.wait_for("0 live, 0 finished")
        for part in ("restarts", "prefill-0", "decode-0", "cache-0", "router-0"):
            terminal.wait_for(part)
        terminal.type(CTRL_C)
        terminal.wait_for("stopping")
        assert terminal.wait_for_end() == 0
        assert "Traceback" not in terminal.shown
    wait_until(lambda: not marked(env["DIPTYCH_TEST_MARK"]), "nobody left")


def test_ctrl_c_in_a_chat_cancels_on_the_server_and_returns_to_the_prompt(tmp_path: Path) -> None:
    with RunningUp(tmp_path, DIPTYCH_TOY_STEP_DELAY_S="0.05") as up, Client(up.router) as client:
        chat = [*DIPTYCH, "chat", "--max-tokens", "2000", "--temperature", "0"]
        with Terminal(chat, up.env) as terminal:
            terminal.wait_for("> ")
            terminal.type("Hello\n")
            wait_until(lambda: client.status().num_live == 1, "the answer has begun")
            terminal.type(CTRL_C)
            terminal.wait_for("cancelled")
            wait_until(lambda: client.status().num_live == 0, "the server has heard of it")
            terminal.wait_for("> ")
            terminal.type("Again\n")
            wait_until(lambda: client.status().num_live == 1, "the chat goes on")
            terminal.type(CTRL_C)
            terminal.wait_for("cancelled")
            terminal.wait_for("> ")
            terminal.type(CTRL_D)
            assert terminal.wait_for_end() == 0
            assert "Traceback" not in terminal.shown


def test_ctrl_c_in_generate_cancels_and_ends_with_130(tmp_path: Path) -> None:
    with RunningUp(tmp_path, DIPTYCH_TOY_STEP_DELAY_S="0.05") as up, Client(up.router) as client:
        with Terminal([*DIPTYCH, "generate", "Hello", "--max-tokens", "2000"], up.env) as terminal:
            wait_until(lambda: client.status().num_live == 1, "the answer has begun")
            terminal.type(CTRL_C)
            assert terminal.wait_for_end() == 130
            wait_until(lambda: client.status().num_live == 0, "the server has heard of it")
