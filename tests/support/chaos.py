"""Kills and stops processes of a running `diptych up` at random moments, under load, and watches its clients.

Every stream must end with the ids that an undisturbed run gives: none lost, none repeated, none wrong.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from diptych.client import Client
from tests.support.running_up import RunningUp, wait_until

SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request. Equal questions have equal answers."""

    length: int
    seed: int
    temperature: float
    num_tokens: int

    @property
    def token_ids(self) -> list[int]:
        return [(41 * i + 97 * self.seed + i * i % 13) % 250 + 1 for i in range(self.length)]


@dataclass(slots=True)
class Outcome:
    """What came of the questions."""

    asked: list[Question] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    num_resumed: int = 0
    errors: list[str] = field(default_factory=list)


def ask(client: Client, question: Question, outcome: Outcome) -> None:
    """One request to its end."""
    tokens: list[int] = []
    for piece in client.generate(
        token_ids=question.token_ids,
        max_tokens=question.num_tokens,
        temperature=question.temperature,
        seed=question.seed,
        ignore_eos=True,
    ):
        if piece.tokens and piece.index != len(tokens):
            outcome.gaps.append(f"{question}: {piece.index} after {len(tokens)}")
        tokens.extend(piece.tokens)
        if piece.finish is not None:
            outcome.num_resumed += piece.finish.trail.num_resumed
            for reason, count in piece.finish.trail.fallbacks.items():
                outcome.fallbacks[reason] = outcome.fallbacks.get(reason, 0) + count
    outcome.asked.append(question)
    outcome.answers.append(tokens)


def undisturbed(folder: Path, questions: list[Question], *arguments: str) -> dict[Question, list[int]]:
    """What one colocated worker answers."""
    outcome = Outcome()
    with RunningUp(folder, *arguments, "--both", "1") as up, Client(up.router, timeout_s=300.0) as client:
        for question in questions:
            ask(client, question, outcome)
    return dict(zip(outcome.asked, outcome.answers, strict=True))


class Load:
    """Clients that ask the questions over and over until told to stop; each ends its last answer."""

    def __init__(self, router: str, questions: list[Question], num_clients: int) -> None:
        self.outcome = Outcome()
        self._router = router
        self._questions = questions
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(300.0)

    def _work(self, number: int) -> None:
        order = random.Random(number)
        with Client(self._router, timeout_s=240.0) as client:
            while not self._enough.is_set():
                try:
                    ask(client, order.choice(self._questions), self.outcome)
                except Exception as error:  # noqa: BLE001 - a client's end is what the test looks at
                    self.outcome.errors.append(repr(error))


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def disturb(up: RunningUp, victims: list[str], times: int, seed: int) -> list[str]:
    """SIGKILL or SIGSTOP of a victim, or of its engine, `times` times; waits until all are back after
    each."""
    dice = random.Random(seed)
    done: list[str] = []
    for _ in range(times):
        time.sleep(dice.uniform(0.05, 0.6))
        name = dice.choice(victims)
        pid = up.pid_of(name)
        target = dice.choice([pid, *children_of(pid)])
        before = up.num_ready(name)
        part = "itself" if target == pid else "its engine"
        if dice.random() < 0.6:
            os.kill(target, signal.SIGKILL)
            done.append(f"{name} {part} killed")
            wait_until(lambda: up.num_ready(name) > before, f"{name} is back", SETTLE_S)  # noqa: B023
        else:
            seconds = dice.uniform(0.2, 5.0)
            os.kill(target, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(target, signal.SIGCONT)
            done.append(f"{name} {part} stopped for {seconds:.1f} s")
    return done
