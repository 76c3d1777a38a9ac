"""One call of the blocking client, read by a thread of its own, so that silence is noticed.

gRPC's blocking read has no timeout, and a call can't be asked whether it lives: a process that was stopped
closes nothing. So a thread reads, and whoever wants the next message waits for it in steps of one heartbeat.
Silence is counted in these steps, not by the clock: a client that was itself stopped meanwhile does not take
its own absence for the router's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from diptych.client.course import HEARTBEAT_S, silence
from diptych.domain.errors import PeerLost
from diptych.rpc.status import domain_errors
from diptych.v1 import router_pb2

if TYPE_CHECKING:
    from diptych.client.routers import Call

_Inbox = queue.SimpleQueue["router_pb2.GenerateResponse | BaseException | None"]


class Line:
    """Messages of one call. `next` belongs to one thread; any may `cancel`."""

    def __init__(self, address: str, call: Call) -> None:
        self.address = address
        self._call = call
        self._inbox: _Inbox = queue.SimpleQueue()
        self._has_ended = False
        threading.Thread(target=_read, args=(call, self._inbox), name=f"read {address}", daemon=True).start()

    def next(self, patience: int) -> router_pb2.GenerateResponse:
        """The next message. Raises what ended the call, and PeerLost where nothing comes for `patience`
        heartbeats; the call is then as it was."""
        for _ in range(patience):
            try:
                message = self._inbox.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                continue
            if isinstance(message, router_pb2.GenerateResponse):
                return message
            self._has_ended = True
            if message is None:
                raise PeerLost("the router ended the stream before its last message")
            with domain_errors():
                raise message
        raise silence(self.address, patience)

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What a call that has ended was told at its begin; of another it can't be known without waiting."""
        return (self._call.initial_metadata() or ()) if self._has_ended else ()

    def cancel(self) -> None:
        """Ends the call. Idempotent."""
        self._call.cancel()  # type: ignore[no-untyped-call]


def cancel_all(lines: Iterable[Line]) -> None:
    """Ends several calls."""
    for line in tuple(lines):
        line.cancel()


def _read(call: Call, inbox: _Inbox) -> None:
    try:
        for message in call:
            inbox.put(message)
    except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
        inbox.put(error)
    else:
        inbox.put(None)
