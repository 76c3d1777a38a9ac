"""Requests that make services send each other a certain kind of message, with the ids that each must get."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import grpc
import pytest

from diptych.v1 import common_pb2, router_pb2, worker_pb2
from tests.support.chaos import children_of
from tests.support.message_kinds import HANDOFF, HEARTBEAT, SESSION, part_of
from tests.support.relay import DOWN, UP, Passage
from tests.support.relayed_system import RelayedSystem
from tests.support.running_up import wait_until

WAIT_S: Final = 60.0
LONG, HUGE, TOO_LARGE = 600, 4300, 5200
"""Tokens of a prompt: three chunks; more than a message holds; more than the prefill worker's pool holds."""
NUM_TOKENS: Final = 8


def prompt(num_tokens: int) -> list[int]:
    return [(31 * i + i * i % 17) % 256 for i in range(num_tokens)]


def parts(passage: Passage, direction: str) -> list[str]:
    """What was said that way, by kind."""
    return [part_of(passage.method, direction, body) for body in passage.of(direction)]


@dataclass
class Answer:
    """What a client got. Fails for a gap, a repeat, or anything after the end."""

    tokens: list[int] = field(default_factory=list)
    finish: common_pb2.Finish | None = None
    request_id: str = ""
    resume_token: bytes = b""

    def take(self, message: router_pb2.GenerateResponse) -> None:
        assert self.finish is None, "something came after the end"
        assert not message.tokens or message.index == len(self.tokens)
        self.tokens += message.tokens
        self.request_id = message.request_id or self.request_id
        self.resume_token = message.resume_token or self.resume_token
        if message.HasField("finish"):
            self.finish = message.finish

    @property
    def fallbacks(self) -> dict[str, int]:
        assert self.finish is not None
        return {told.reason: told.count for told in self.finish.trail.fallbacks}


class Provocations:
    """Each method, by its name, is a way to make messages come. `expected`: ids by length of the prompt."""

    def __init__(self, system: RelayedSystem) -> None:
        self.system = system
        self.expected: dict[int, list[int]] = {}
        self._salts = count()
        for length in (LONG, HUGE, TOO_LARGE):
            self.expected[length] = self._whole(self._call(length)).tokens

    def run(self, name: str) -> Answer:
        """The answer of the request that was to be disturbed; its ids were as they must be."""
        found: Answer = getattr(self, name)()
        return found

    def long(self) -> Answer:
        return self._checked(LONG)

    def huge(self) -> Answer:
        return self._checked(HUGE)

    def too_large(self) -> Answer:
        return self._checked(TOO_LARGE)

    def cancelled(self) -> Answer:
        """A client that leaves while its request decodes."""
        call = self._call(LONG, num_tokens=500)
        first = Answer()
        while not first.tokens:
            first.take(next(call))
        call.cancel()
        return self._checked(LONG)

    def cancelled_early(self) -> Answer:
        """A client that leaves while its prompt is computed: the prefill worker's engine waits for that."""
        with self._at_first_chunk("prefill") as (passage, resume):
            call = self._call(LONG)
            found = passage()
            call.cancel()
            wait_until(lambda: "stop" in parts(found, DOWN), "the attempt is stopped", WAIT_S)
            resume()
        return self._checked(LONG)

    def slow(self) -> Answer:
        """A decode engine that takes its time, so that the hand-off's stream has pauses."""
        with self._at_first_chunk("decode") as (passage, resume):
            call = self._call(LONG)
            found = passage()
            wait_until(lambda: HEARTBEAT in parts(found, UP), "a sign of life", WAIT_S)
            resume()
            return self._same(self._whole(call), LONG)

    def attached(self) -> Answer:
        """A client that comes back for its stream while the first call still lasts."""
        before = self._call(HUGE, num_tokens=60)
        answer = Answer()
        while not (answer.tokens and answer.resume_token):
            answer.take(next(before))
        found = self._attached(answer)
        before.cancel()
        assert found.tokens[:NUM_TOKENS] == self.expected[HUGE]
        assert len(found.tokens) == 60
        return found

    def refused(self) -> Answer:
        """A client that comes back for a stream that is gone."""
        answer = self._checked(LONG)
        self.system.settle()
        with pytest.raises(grpc.RpcError) as raised:
            self._attached(Answer(answer.tokens[:1], resume_token=answer.resume_token))
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        return answer

    def borrowed(self) -> Answer:
        """A prompt whose chunks the cache service has, and nobody else."""
        salt = f"borrowed {next(self._salts)}"
        self._same(self._whole(self._call(LONG, salt=salt)), LONG)
        answer = Answer()

        def is_borrowed() -> bool:
            nonlocal answer
            for role in ("prefill", "decode"):
                self.system.worker(role).DropCache(worker_pb2.DropCacheRequest(), timeout=WAIT_S)
                wait_until(lambda role=role: not self.system.inspect(role).load.blocks_cached, "dropped")  # type: ignore[misc]
            answer = self._same(self._whole(self._call(LONG, salt=salt)), LONG)
            return answer.finish is not None and answer.finish.trail.num_cached_tokens > 0

        wait_until(is_borrowed, "chunks are borrowed", WAIT_S)  # the directory hears of chunks in batches
        return answer

    def session(self) -> Answer:
        """A session that breaks under a request."""
        call = self._call(LONG, num_tokens=60)
        answer = Answer()
        while not answer.tokens:
            answer.take(next(call))
        for passage in self.system.relays.lasting(SESSION):
            self.system.relays.break_off(passage)
        answer = self._whole(call, answer)
        assert answer.tokens[:NUM_TOKENS] == self.expected[LONG]
        assert len(answer.tokens) == 60
        return answer

    def _attached(self, answer: Answer) -> Answer:
        """The rest of an answer, from another call; again where the router says that it may be had later."""
        turns = count(1)

        def is_whole() -> bool:
            request = router_pb2.AttachRequest(
                resume_token=answer.resume_token, next_index=len(answer.tokens), turn=next(turns)
            )
            try:
                self._whole(self.system.router.Attach(request, timeout=WAIT_S), answer)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            return answer.finish is not None

        wait_until(is_whole, "attached", WAIT_S)
        return answer

    @contextmanager
    def _at_first_chunk(self, role: str) -> Iterator[tuple[Callable[[], Passage], Callable[[], None]]]:
        """That worker's engine stops when the next chunk is announced, and before that is heard of."""
        (engine,) = children_of(self.system.services[role]._process.pid)
        found: list[Passage] = []
        meddle = self.system.relays.meddle

        def stop(passage: Passage, direction: str, body: bytes | None) -> list[bytes] | None:
            is_first = not found and passage.method == HANDOFF and direction == UP and body is not None
            if is_first and part_of(HANDOFF, UP, body or b"") == "chunk":
                os.kill(engine, signal.SIGSTOP)
                found.append(passage)
            return meddle(passage, direction, body)

        def passage() -> Passage:
            wait_until(lambda: bool(found), "a chunk is announced", WAIT_S)
            return found[0]

        self.system.relays.meddle = stop
        try:
            yield passage, lambda: os.kill(engine, signal.SIGCONT)
        finally:
            os.kill(engine, signal.SIGCONT)
            self.system.relays.meddle = meddle

    def _checked(self, length: int) -> Answer:
        return self._same(self._whole(self._call(length)), length)

    def _same(self, answer: Answer, length: int) -> Answer:
        assert answer.tokens == self.expected[length]
        return answer

    def _call(self, length: int, num_tokens: int = NUM_TOKENS, salt: str = "") -> Any:
        """A salt of its own, unless one is given: its prefix is cached nowhere."""
        params = common_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=3, temperature=0.8)
        request = router_pb2.GenerateRequest(params=params, cache_salt=salt or f"{next(self._salts)}")
        request.token_ids.ids.extend(prompt(length))
        return self.system.router.Generate(request, timeout=WAIT_S)

    def _whole(self, call: Any, answer: Answer | None = None) -> Answer:
        answer = answer or Answer()
        for message in call:
            answer.take(message)
        assert answer.finish is not None
        assert answer.finish.reason == common_pb2.FINISH_REASON_LENGTH
        return answer
