"""Answers of the toy model: what must come, and streams that collect what did."""

from __future__ import annotations

import secrets
import threading
from types import TracebackType
from typing import Self

from diptych.client import Client, Finish
from diptych.domain.sampling import SamplingParams
from diptych.engine.toy import ToyRunner
from tests.support.runner_driver import DrivenSequence, decode, prefill, table

DEADLINE_S = 90.0
BLOCK_TOKENS = 16


def prompt_of(num_tokens: int, number: int = 0) -> list[int]:
    """A prompt of that length; another for each number."""
    return [(7 * i + 31 * number + num_tokens) % 96 + 32 for i in range(num_tokens)]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    """The one right answer, computed here: greedy, past any end of sequence."""
    num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_TOKENS)
    runner = ToyRunner(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
    sample = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    sequence = DrivenSequence(list(prompt), table(range(num_blocks)), sample=sample)
    prefill(runner, sequence)
    return decode(runner, sequence, num_tokens - 1)


class Stream(threading.Thread):
    """One answer, read in a thread of its own."""

    def __init__(self, router: str, prompt: list[int], num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._router = router
        self._prompt = prompt
        self._num_tokens = num_tokens
        self.begun = threading.Event()
        """The first token is here, or the stream has failed."""
        self.indexes: list[int] = []
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Client(self._router, timeout_s=DEADLINE_S) as client:
                answer = client.generate(
                    token_ids=self._prompt, max_tokens=self._num_tokens, ignore_eos=True,
                    cache_salt=secrets.token_hex(4),  # nothing that is cached may spare a hop
                )  # fmt: skip
                for piece in answer:
                    self.indexes += range(piece.index, piece.index + len(piece.tokens))
                    self.tokens += piece.tokens
                    self.finish = piece.finish
                    self.begun.set()
        except Exception as error:  # noqa: BLE001  # shown by `check`, in the thread of the test
            self.error = error
        finally:
            self.begun.set()

    def check(self) -> Finish:
        """How it ended, once it has: every token right, none lost, none twice."""
        self.join(DEADLINE_S)
        assert not self.is_alive(), f"no end within {DEADLINE_S} s, {len(self.tokens)} tokens came"
        if self.error is not None:
            raise self.error
        assert self.indexes == list(range(self._num_tokens))
        assert self.tokens == expected(self._prompt, self._num_tokens)
        assert self.finish is not None
        return self.finish


class Streams:
    """Several answers at a time. Entered: each has its first token. Left: each has ended, and was right."""

    def __init__(self, router: str, count: int, num_tokens: int, prompt_tokens: int = 600) -> None:
        self._streams = [Stream(router, prompt_of(prompt_tokens, i), num_tokens) for i in range(count)]
        self.finishes: list[Finish] = []

    def __enter__(self) -> Self:
        for stream in self._streams:
            stream.start()
        for stream in self._streams:
            assert stream.begun.wait(DEADLINE_S), "no first token"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finishes = [stream.check() for stream in self._streams]

    def abandon(self) -> None:
        """Whoever serves them is gone on purpose: they only have to end."""
        for stream in self._streams:
            stream.join(DEADLINE_S)
            assert not stream.is_alive()
        self._streams = []


def ask(router: str, prompt_tokens: int = 600, num_tokens: int = 8) -> Finish:
    """One answer, checked."""
    with Streams(router, 1, num_tokens, prompt_tokens) as streams:
        pass
    return streams.finishes[0]
