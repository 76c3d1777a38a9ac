"""The I/O process's end of the pair: starts the engine process, and exchanges batches with it from asyncio.

Spawned, never forked: a new interpreter that inherits one end of a socket pair and nothing else. It leaves
by itself when the pair closes, so that it can't outlive its parent, however that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from diptych.domain.errors import PeerLost
from diptych.engine.frames import HEADER, FrameCodec, frame_length

Out = TypeVar("Out")
In = TypeVar("In")


class EngineProcess(Generic[Out]):
    """A child that runs `python -m MODULE FD ARGUMENT`, and the stream of its outboxes."""

    def __init__(self, module: str, argument: str, outbox_type: type[Out]) -> None:
        self._module = module
        self._argument = argument
        self._codec = FrameCodec(outbox_type)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel says that it was stopped, where it can be asked (Linux). One that is busy
        may say as little, and must not be taken for it."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return status.rpartition(b") ")[2][:1] in (b"T", b"t")

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, str(theirs.fileno()), self._argument,
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)

    def send(self, inbox: object) -> None:
        """Sends one batch. Never waits: what the engine has not taken yet is bounded by admission."""
        if self._writer is None or self._writer.is_closing():
            raise PeerLost("the engine process is gone")
        self._writer.write(self._codec.encode(inbox))

    async def receive(self) -> Out:
        """The next batch. Raises PeerLost when the engine process is gone."""
        if self._reader is None:
            raise PeerLost("the engine process was not started")
        try:
            length = frame_length(await self._reader.readexactly(HEADER.size))
            return self._codec.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._wait(1.0)
            raise PeerLost(f"the engine process ended with status {status}") from None

    async def stop(self, grace_s: float = 5.0) -> None:
        """Closes the pair, upon which the engine leaves; kills it after `grace_s` seconds."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        if self._process is not None and await self._wait(grace_s) is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _wait(self, timeout_s: float) -> int | None:
        if self._process is None:
            return None
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return None


class Batch(Generic[In]):
    """Collects what is said within one turn of the event loop into one inbox."""

    def __init__(self, process: EngineProcess[Out], empty: Callable[[], In]) -> None:
        self._send = process.send
        self._empty = empty
        self._open: In | None = None

    def open(self) -> In:
        """The inbox to add to. It is sent when the event loop turns."""
        if self._open is None:
            self._open = self._empty()
            asyncio.get_running_loop().call_soon(self._flush)
        return self._open

    def _flush(self) -> None:
        inbox, self._open = self._open, None
        # Whoever waits for the engine learns of its end from the outbox stream.
        with contextlib.suppress(PeerLost):
            self._send(inbox)
