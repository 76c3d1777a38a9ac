"""Random kills and stops under load: no token lost, none repeated, none wrong, and nothing left.

`make chaos` is the second of these tests, ten times as long; `DIPTYCH_CHAOS_SEED` gives it another course.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.chaos import disturb
from tests.support.chaos_load import Load, Question, undisturbed
from tests.support.narrator import Narrator
from tests.support.running_up import RunningUp, run, wait_until

NUM_DISTURBANCES = int(os.environ.get("DIPTYCH_CHAOS", "20"))
SEED = int(os.environ.get("DIPTYCH_CHAOS_SEED", "1"))

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600 + 30 * NUM_DISTURBANCES)]

VICTIMS = ["prefill-0", "prefill-1", "decode-0", "decode-1", "cache-0", "router-0", "store"]
APART = ("--prefill", "2", "--decode", "2")
SMALL = {"DIPTYCH_NUM_BLOCKS": "160"}
"""Of 16 tokens: room for four of the longest, and started in a fraction of the time."""


def questions(num_tokens: int) -> list[Question]:
    """Some stay where they are decoded, some are handed over; every other one draws its tokens."""
    lengths = (5, 40, 270, 300, 520)
    return [Question(n, i, 0.9 * (i % 2), num_tokens) for i, n in enumerate(lengths)]


def is_clean(folder: Path) -> bool:
    """Whether `diptych audit` finds nothing wrong, and no worker holds anything for a request."""
    done = run(folder, "audit", "--json")
    members = json.loads(done.stdout)["members"]
    busy = [
        m for m in members if m["account"] and (m["account"]["num_running"] or m["account"]["num_waiting"])
    ]
    owned = [m for m in members if m["account"] and m["account"]["blocks"][2]]
    return done.returncode == 0 and not busy and not owned and not any(m["num_live"] for m in members)


def run_chaos(folder: Path, num_tokens: int, *arguments: str, **environment: str) -> None:
    asked = questions(num_tokens)
    with RunningUp(folder, *arguments, *APART, **SMALL, **environment) as up:
        expected = undisturbed(up.router, asked)
        with Load(up.router, asked, num_clients=4) as load:
            outcome = load.outcome
            with Narrator("chaos", NUM_DISTURBANCES, lambda: f"{len(outcome.answers)} answers") as narrator:
                for done in disturb(up, load, VICTIMS, NUM_DISTURBANCES, SEED):
                    narrator.tell(str(done))
        narrator.say(str(outcome))
        assert outcome.errors == [], outcome
        assert outcome.gaps == [], outcome
        assert outcome.wrong(expected) == [], outcome
        assert len(outcome.answers) >= 4
        wait_until(lambda: is_clean(folder), "nothing is left of all that")


def test_the_toy_model_survives_anything(tmp_path: Path) -> None:
    run_chaos(tmp_path, 40, DIPTYCH_TOY_STEP_DELAY_S="0.02")


@pytest.mark.engine
def test_the_real_model_survives_anything(tmp_path: Path) -> None:
    run_chaos(tmp_path, 12, "--model", "smollm2-135m", "--profile", "exact")
