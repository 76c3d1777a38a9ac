"""Asking an engine how it is now: the answer is younger than the question, or none comes."""

from __future__ import annotations

import asyncio

import pytest

from diptych.domain.errors import PeerLost
from diptych.worker import looks
from diptych.worker.looks import Looks


async def asked(under_way: asyncio.Task[None]) -> None:
    """Lets a question be put."""
    await asyncio.wait({under_way}, timeout=0)


async def test_only_a_load_that_answers_ends_the_wait() -> None:
    questions: list[int] = []
    watch = Looks(questions.append)
    first, second = asyncio.create_task(watch.take()), asyncio.create_task(watch.take())
    await asked(second)
    assert questions == [1, 2]
    watch.answered(0)  # said by itself, before the questions came
    await asked(first)
    assert not first.done()
    watch.answered(1)
    await first
    assert not second.done()
    watch.answered(2)
    await second
    assert watch._waiting == {}


async def test_one_answer_to_the_newest_question_ends_all() -> None:
    watch = Looks(lambda look: None)
    waits = [asyncio.create_task(watch.take()) for _ in range(3)]
    await asked(waits[-1])
    watch.answered(3)
    await asyncio.gather(*waits)
    assert watch._waiting == {}


async def test_an_engine_that_has_stopped_or_ended_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looks, "WAIT_S", 0.0)
    stopped = Looks(lambda look: None)
    await stopped.take()

    def gone(look: int) -> None:
        raise PeerLost("the engine process is gone")

    ended = Looks(gone)
    await ended.take()
    assert stopped._waiting == ended._waiting == {}
