"""The hand-off streams of prefill workers: one an attempt, from `Handoff` to its end.

The engine's brain decides what an attempt is worth; this only carries messages, and says "lost" when a
stream ends before the brain has ended its attempt. Only an attempt that has begun and not ended is listened
to. It may be ended before its stream arrives: that is remembered for a while, so that the stream is told at
once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from diptych.domain.errors import InvalidField, Stale
from diptych.domain.ids import Attempt, Epoch, RequestId
from diptych.v1 import decode_pb2
from services.decode.messages import AttemptEnded, ChunkDone

REMEMBERED = 1024

Key = tuple[RequestId, Attempt]
Source = tuple[str, str]
"""Kind and address of a KV channel."""


class AttemptStream:
    """What is to be said to one prefill worker about one attempt."""

    def __init__(self, key: Key, sources: frozenset[Source]) -> None:
        """`sources`: what may be read for it. Taken at its start, since a worker that drains is deregistered
        first."""
        self.key = key
        self.sources = sources
        self.ended = False
        self._queue: asyncio.Queue[decode_pb2.HandoffResponse] = asyncio.Queue()

    def send(self, response: decode_pb2.HandoffResponse) -> None:
        self._queue.put_nowait(response)

    async def next(self) -> decode_pb2.HandoffResponse:
        return await self._queue.get()


class AttemptStreams:
    """All hand-off streams of this worker."""

    def __init__(self) -> None:
        self._streams: dict[Key, AttemptStream] = {}
        self._awaited: set[Key] = set()
        """Attempts that have begun and not ended."""
        self._ended: OrderedDict[Key, str] = OrderedDict()

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def open(self, key: Key, sources: frozenset[Source]) -> AttemptStream:
        """Raises Stale for an attempt that has a stream already, and for one that nobody waits for."""
        if key in self._streams:
            raise Stale(f"attempt {key[1]} of {key[0]} has a stream already")
        if key not in self._awaited and key not in self._ended:
            raise Stale(f"nobody waits for attempt {key[1]} of {key[0]}")
        stream = self._streams[key] = AttemptStream(key, sources)
        if key in self._ended:
            self._tell_end(stream, self._ended[key])
        return stream

    def begun(self, key: Key) -> None:
        """The brain has answered `Begin` with this attempt."""
        self._awaited.add(key)

    def close(self, stream: AttemptStream) -> None:
        self._streams.pop(stream.key, None)

    def chunk_done(self, done: ChunkDone) -> None:
        stream = self._streams.get((done.request_id, done.attempt))
        if stream is not None:
            released = decode_pb2.ChunkReleased(index=done.index)
            stream.send(decode_pb2.HandoffResponse(released=released))

    def attempt_ended(self, ended: AttemptEnded) -> None:
        key = (ended.request_id, ended.attempt)
        self._awaited.discard(key)
        self._ended[key] = ended.reason
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        if key in self._streams:
            self._tell_end(self._streams[key], ended.reason)

    def _tell_end(self, stream: AttemptStream, reason: str) -> None:
        stream.ended = True
        if reason:
            stream.send(decode_pb2.HandoffResponse(stop=decode_pb2.HandoffStop(reason=reason)))
        else:
            stream.send(decode_pb2.HandoffResponse(done=decode_pb2.HandoffDone()))


def check_open(message: decode_pb2.HandoffRequest, epoch: Epoch) -> decode_pb2.HandoffOpen:
    """The first message of a hand-off stream. Raises Stale or InvalidField."""
    if message.WhichOneof("body") != "open":
        raise InvalidField("open", "must be the first message of a hand-off")
    if message.open.decode_epoch != epoch:
        raise Stale(f"epoch {message.open.decode_epoch} is not this process")
    return message.open


def key_of(opening: decode_pb2.HandoffOpen) -> Key:
    """The attempt that a stream is about."""
    return RequestId(opening.request_id), Attempt(opening.attempt)
