"""The engine process's end of the pair: batches in, batches out, and a way to be woken by other threads."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from diptych.engine.frames import HEADER, FrameCodec, frame_length

In = TypeVar("In")
InOnly = TypeVar("InOnly", covariant=True)


class Post(Protocol[InOnly]):
    """What a loop needs of a mailbox."""

    def receive(self, timeout_s: float) -> Sequence[InOnly]: ...

    def send(self, outbox: object) -> None: ...

    def wake(self) -> None: ...


class Mailbox(Generic[In]):
    """Blocking, single-threaded but for `wake`. Raises EOFError when the other process is gone."""

    def __init__(self, connection: socket.socket, inbox_type: type[In]) -> None:
        self._connection = connection
        self._codec = FrameCodec(inbox_type)
        self._buffer = bytearray()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (connection, self._wake_receiver, self._wake_sender):
            end.setblocking(False)

    def receive(self, timeout_s: float) -> list[In]:
        """All batches that have arrived. Waits up to `timeout_s` seconds for the first one or a `wake`."""
        ready, _, _ = select.select([self._connection, self._wake_receiver], [], [], timeout_s)
        if self._wake_receiver in ready:
            self._wake_receiver.recv(4096)
        if self._connection in ready:
            self._fill()
        return self._take()

    def send(self, outbox: object) -> None:
        """Sends one batch; waits while the other side is slow to read."""
        rest = memoryview(self._codec.encode(outbox))
        while rest:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                select.select([], [self._connection], [])
            except (BrokenPipeError, ConnectionResetError):
                raise EOFError("the I/O process is gone") from None

    def wake(self) -> None:
        """Makes a waiting `receive` return. From any thread; a full pipe means that it will wake anyway."""
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"\0")

    def close(self) -> None:
        for end in (self._connection, self._wake_receiver, self._wake_sender):
            end.close()

    def _fill(self) -> None:
        while True:
            try:
                piece = self._connection.recv(1 << 20)
            except BlockingIOError:
                return
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise EOFError("the I/O process is gone")
            self._buffer += piece

    def _take(self) -> list[In]:
        batches: list[In] = []
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + frame_length(bytes(self._buffer[: HEADER.size]))
            if len(self._buffer) < end:
                break
            batches.append(self._codec.decode(bytes(self._buffer[HEADER.size : end])))
            del self._buffer[:end]
        return batches
