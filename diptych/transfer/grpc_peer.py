"""One peer of the gRPC channel: one connection, and the few threads that read over it.

Each peer has its own queue and threads, so a peer that hangs delays nobody else's reads. Threads start
with reads and leave some time after the last. A peer that was lost is *retired*: what still waits for it ends
with the same error, and the next read dials anew, without the back-off of the broken connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import grpc

from diptych.domain.errors import PeerError, PeerLost, TransferFailed
from diptych.domain.layout import WIRE_VERSION
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.grpc_wire import CLIENT_OPTIONS, READ_METHOD, peer_error
from diptych.transfer.landing import Landing
from diptych.transfer.parts import decode_part
from diptych.transfer.reads import PendingRead
from diptych.v1.kv_pb2 import KvReadRequest

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""Reads from one peer at a time: while one waits for the network, the other copies."""

LINGER_S = 10.0
"""How long a thread waits for the next read: the first call of a new one takes 1.5 ms longer (measured)."""


class Peer:
    """The reading side's end of one connection. Its threads are the workers of the reads given to it."""

    def __init__(self, address: str, tls: ChannelTls | None) -> None:
        self.address = address
        self._channel = _dial(address, tls)
        self._call = self._channel.unary_stream(
            READ_METHOD,
            request_serializer=KvReadRequest.SerializeToString,
            response_deserializer=bytes,  # as they are: `decode_part` takes them apart without a copy
        )
        self._changed = threading.Condition()
        self._queue: deque[PendingRead] = deque()
        self._threads: list[threading.Thread] = []
        self._num_threads = 0
        self._num_idle = 0
        self._retired = False
        self._last_used = time.monotonic()

    @property
    def retired(self) -> bool:
        return self._retired

    @property
    def gone(self) -> bool:
        """Retired, and its last thread has left."""
        return self._retired and not any(thread.is_alive() for thread in self._threads)

    def idle_s(self, now: float) -> float:
        """Seconds without a read."""
        with self._changed:
            busy = self._queue or self._num_idle < self._num_threads
            return 0.0 if busy else now - self._last_used

    def submit(self, read: PendingRead) -> bool:
        """Queues a read. False when this peer is retired: dial anew."""
        with self._changed:
            if self._retired:
                return False
            self._queue.append(read)
            if self._num_idle < len(self._queue) and self._num_threads < NUM_THREADS:
                self._num_threads += 1
                thread = threading.Thread(target=self._work, name=f"kv-read-{self.address}", daemon=True)
                self._threads = [*(old for old in self._threads if old.is_alive()), thread]
                thread.start()
            self._changed.notify()
            return True

    def retire(self, reason: PeerError) -> None:
        """Takes no more reads, ends the waiting ones, and hangs up after the last that is under way."""
        with self._changed:
            self._retired = True
            waiting = list(self._queue)
            hang_up = self._num_threads == 0
            self._changed.notify_all()
        for read in waiting:
            read.stop(reason)
        if hang_up:
            self._channel.close()

    def join(self) -> None:
        """Waits until every thread has left, which takes as long as the reads that were not stopped."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        while (read := self._next()) is not None:
            if read.begin():
                self._read(read)
            del read  # its memory must not live until the next one

    def _next(self) -> PendingRead | None:
        """The next read, or None for the thread to leave: retired, or nothing to do for a while."""
        with self._changed:
            self._last_used = time.monotonic()
            self._num_idle += 1
            self._changed.wait_for(lambda: self._queue or self._retired, LINGER_S)
            self._num_idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._num_threads -= 1
            hang_up = self._retired and self._num_threads == 0
        if hang_up:
            self._channel.close()
        return None

    def _read(self, read: PendingRead) -> None:
        error: PeerError | None = None
        try:
            self._transfer(read)
        except grpc.RpcError as failure:
            error = peer_error(self.address, failure)
        except PeerError as failure:
            error = failure
        except Exception as failure:  # the thread's boundary: a read that never ends would be worse
            logger.exception("a read from %s failed", self.address)
            error = TransferFailed(f"{self.address}: {failure!r}")
        read.finish(error)
        if isinstance(read.error, PeerLost):
            self.retire(read.error)

    def _transfer(self, read: PendingRead) -> None:
        remote = read.remote
        request = KvReadRequest(
            wire_version=WIRE_VERSION,
            region_key=remote.region.key,
            offset=remote.offset,
            num_bytes=remote.num_bytes,
        )
        landing = Landing(read.local)
        call = self._call(request, timeout=read.remaining_s)
        try:
            read.interrupt_with(call.cancel)
            for message in call:
                landing.put(*decode_part(message))
            landing.check_complete()
        finally:
            call.cancel()  # type: ignore[no-untyped-call]


def _dial(address: str, tls: ChannelTls | None) -> grpc.Channel:
    """A channel that connects with its first call."""
    if tls is None:
        return grpc.insecure_channel(address, CLIENT_OPTIONS)
    if tls.server_name is None:
        return grpc.secure_channel(address, tls.client, CLIENT_OPTIONS)
    named = ("grpc.ssl_target_name_override", tls.server_name)
    return grpc.secure_channel(address, tls.client, [*CLIENT_OPTIONS, named])
