"""Kills and stops processes of a running `diptych up` at random moments, under load.

One disturbance at a time: the next one comes when the victim is back, for a stream is promised to survive the
death of any one process. After the router's the clients must have come back too: until then they are known
to their decode worker alone, and its death would be the second.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.chaos_load import Load
from tests.support.running_up import RunningUp, wait_until

BACK_S = 120.0
KILLED = 0.6
"""Share of the disturbances that kill; the others stop for a while."""
STOPS = ((0.5, 0.2, 1.0), (0.4, 2.1, 3.6), (0.1, 5.1, 5.6))
"""How likely, and from how long to how long in seconds: shorter than anybody's patience, longer than that of
routers and clients, longer than that of everybody."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What was done, and how long everything took to be as before."""

    victim: str
    what: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.victim} {self.what}; {self.seconds:.1f} s"


def disturb(
    up: RunningUp, load: Load, victims: Sequence[str], times: int, seed: int
) -> Iterator[Disturbance]:
    """SIGKILL or SIGSTOP of a victim, or of its engine, `times` times; each is told when it is over."""
    dice = random.Random(seed)
    for _ in range(times):
        time.sleep(dice.uniform(0.05, 0.6))
        name = dice.choice(victims)
        begun = time.monotonic()
        pid = up.pid_of(name)
        target = dice.choice([pid, *children_of(pid)])
        part = "" if target == pid else "'s engine"
        if dice.random() < KILLED:
            before = up.num_ready(name)
            os.kill(target, signal.SIGKILL)
            wait_until(lambda: up.num_ready(name) > before, f"{name} is back", BACK_S)  # noqa: B023
            what = f"{part} killed"
        else:
            seconds = _how_long(dice)
            os.kill(target, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(target, signal.SIGCONT)
            what = f"{part} stopped for {seconds:.1f} s"
        if name.startswith("router"):
            load.wait_until_all_go_on()
        yield Disturbance(name, what.strip(), time.monotonic() - begun)


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _how_long(dice: random.Random) -> float:
    [(_, least, most)] = dice.choices(STOPS, [weight for weight, _, _ in STOPS])
    return dice.uniform(least, most)
