"""Clients that ask the same few questions over and over, and keep what came of each stream."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from diptych.client import Client
from tests.support.running_up import wait_until

STREAM_S = 300.0
"""Longest that one answer may take, deaths and restarts included."""
PROGRESS_S = 60.0


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
    errors: list[str] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    """Streams that went on at another decode worker."""
    num_reattached: int = 0
    """And those that went on at another start of the router."""
    num_pieces: Counter[int] = field(default_factory=Counter)
    """Messages that each client has had."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, question: Question, tokens: list[int], num_reattached: int) -> None:
        """An answer has come to its end."""
        with self._lock:
            self.asked.append(question)
            self.answers.append(tokens)
            self.num_reattached += num_reattached

    def wrong(self, expected: dict[Question, list[int]]) -> list[tuple[Question, list[int]]]:
        """Answers with a token lost, repeated or changed."""
        pairs = zip(self.asked, self.answers, strict=True)
        return [(question, answer) for question, answer in pairs if answer != expected[question]]

    def by_question(self) -> dict[Question, list[int]]:
        """The last answer to each."""
        return dict(zip(self.asked, self.answers, strict=True))

    def __str__(self) -> str:
        return (
            f"{len(self.answers)} answers; {self.num_resumed} times another decode worker, "
            f"{self.num_reattached} times another start of the router; {dict(self.fallbacks)}"
        )


def ask(client: Client, question: Question, outcome: Outcome, number: int = 0) -> None:
    """One request to its end."""
    tokens: list[int] = []
    answer = client.generate(
        token_ids=question.token_ids,
        max_tokens=question.num_tokens,
        temperature=question.temperature,
        seed=question.seed,
        ignore_eos=True,
    )
    for piece in answer:
        outcome.num_pieces[number] += 1
        if piece.tokens and piece.index != len(tokens):
            outcome.gaps.append(f"{question}: {piece.index} after {len(tokens)}")
        tokens.extend(piece.tokens)
        if piece.finish is not None:
            outcome.num_resumed += piece.finish.trail.num_resumed
            outcome.fallbacks.update(piece.finish.trail.fallbacks)
    outcome.add(question, tokens, answer.num_reattached)


def undisturbed(router: str, questions: Sequence[Question]) -> dict[Question, list[int]]:
    """What is answered while nothing happens; asked all at once, for that is quicker."""
    outcome = Outcome()
    with Client(router, timeout_s=STREAM_S) as client, ThreadPoolExecutor(len(questions)) as pool:
        list(pool.map(lambda question: ask(client, question, outcome), questions))
    return outcome.by_question()


class Load:
    """Clients that ask until told to stop; each ends its last answer."""

    def __init__(self, router: str, questions: Sequence[Question], num_clients: int) -> None:
        self.outcome = Outcome()
        self._router = router
        self._questions = questions
        self._num_clients = num_clients
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(STREAM_S)

    def has_moved_since(self, before: Counter[int]) -> bool:
        """Whether every client has had a message since `before`, or has ended."""
        now = self.outcome.num_pieces
        alive = [number for number, thread in enumerate(self._threads) if thread.is_alive()]
        return all(now[number] > before[number] for number in alive)

    def wait_until_all_go_on(self) -> None:
        """Until every client has had another message."""
        before = self.outcome.num_pieces.copy()
        wait_until(lambda: self.has_moved_since(before), "every stream goes on", PROGRESS_S)

    def _work(self, number: int) -> None:
        order = random.Random(number)
        with Client(self._router, timeout_s=STREAM_S) as client:
            while not self._enough.is_set():
                try:
                    ask(client, order.choice(self._questions), self.outcome, number)
                except Exception as error:  # noqa: BLE001 - a client's end is what the test looks at
                    self.outcome.num_pieces[number] += 1
                    self.outcome.errors.append(repr(error))
