"""The reading side of the NIXL channel: one thread, one agent, and the reads under way.

    submit ─▶ source ready? ─ yes ─▶ post ─▶ poll … ─▶ finish
                  └─ no: asked for, met, and then posted

The thread sleeps until it is told something: without a limit while nothing is under way, else an eighth of
the time for which the youngest read has been, so that completion is noticed within about that share of a
read's time and a long one costs little. (Between processes of one host a read has ended when `post` returns.)

**Who owns the local span.** From `begin` to `finish` it is the channel's. A read that is asked to end and is
under way is waited for, as the others are; the bytes may arrive until it has ended. One that does not end
within `PATIENCE_S` of being asked is *cut off*: the agent is closed, and only then the span is the
caller's again. That costs every other read under way, which fail and can be asked for again; it takes a peer
that hangs in mid-read over a transport that needs its help, or a network that swallows packets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diptych.domain.errors import InvalidField, PeerError, PeerLost, TransferFailed
from diptych.domain.ports import MemorySpan
from diptych.transfer.nixl_agent import Agent, Handle, Registration
from diptych.transfer.nixl_library import Transport
from diptych.transfer.nixl_local import LocalMemory
from diptych.transfer.nixl_source import HELLO_BYTES, Source, SourceKey, Stage, ask, check_one_sided
from diptych.transfer.reads import PendingRead
from diptych.v1.kv_pb2 import KvDescription

logger = logging.getLogger(__name__)

PATIENCE_S = 0.5
MIN_WAIT_S, MAX_WAIT_S = 50e-6, 0.02
IDLE_SOURCE_S = 300.0
"""A region that nothing was read from for so long is forgotten when another one is met."""


@dataclass(slots=True)
class _Flight:
    """A read that UCX has; without `read` the first one, which only connects."""

    source: Source
    handle: Handle
    posted_at: float
    read: PendingRead | None = None
    registration: Registration | None = None
    asked_to_end_at: float = 0.0


class Reader:
    """Used from any thread; everything behind `submit`, `prepare` and `close` happens on its own."""

    def __init__(self, open_agent: Callable[[], Agent], transport: Transport) -> None:
        """Opens the agent at once. Raises InvalidField when it can't be."""
        self._open_agent = open_agent
        self._transport = transport
        self._agent = open_agent()
        self._local = LocalMemory(self._agent)
        self._commands: deque[Callable[[], None]] = deque()
        self._told = threading.Condition()
        self._sources: dict[SourceKey, Source] = {}
        self._flights: list[_Flight] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl-reads", daemon=True)
        self._thread.start()

    def submit(self, read: PendingRead) -> None:
        """Takes over a queued read."""
        self._tell(partial(self._take, read))

    def prepare(self, memory: MemorySpan) -> None:
        """Reads will land in parts of `memory`."""
        self._tell(partial(self._local.prepare, memory))

    def close(self) -> None:
        """Ends the thread. Reads under way are waited for if they were stopped before. Idempotent."""
        self._tell(self._close)
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._turn(self._wait_s())
        self._cut_off("the nixl channel was closed")

    def _turn(self, wait_s: float | None) -> None:
        command = self._next(wait_s)
        if command is not None:
            try:
                command()
            except Exception:  # the thread's boundary: one bad read must not stop all the others
                logger.exception("a command of the nixl channel failed")
            del command  # what it refers to must not live until the next one
        self._poll()

    def _tell(self, command: Callable[[], None]) -> None:
        with self._told:
            self._commands.append(command)
            self._told.notify()

    def _next(self, wait_s: float | None) -> Callable[[], None] | None:
        # No `SimpleQueue`: seen with short timeouts, its `get` slept on until the next `put`, for 30 seconds.
        with self._told:
            if not self._commands:
                self._told.wait(wait_s)
            return self._commands.popleft() if self._commands else None

    def _wait_s(self) -> float | None:
        if not self._flights:
            return None
        youngest_s = time.monotonic() - max(flight.posted_at for flight in self._flights)
        return min(max(youngest_s / 8, MIN_WAIT_S), MAX_WAIT_S)

    def _close(self) -> None:
        self._closing = True

    def _wake(self) -> None:
        self._tell(lambda: None)

    # One read.

    def _take(self, read: PendingRead) -> None:
        region = read.remote.region
        source = self._sources.get((region.address, region.key))
        if source is None:
            source = self._meet(Source(region, time.monotonic()))
        source.used_at = time.monotonic()
        if source.stage is Stage.READY:
            self._post(source, read)
        else:
            source.waiting.append(read)

    def _post(self, source: Source, read: PendingRead) -> None:
        if not read.begin():
            return
        flight = _Flight(source, 0, time.monotonic(), read)
        try:
            address = source.address_of(read)
            flight.registration = self._local.register(read.local)
            flight.handle, ended = self._agent.start(
                source.agent, address, source.description.device, read.local
            )
        except (PeerError, ValueError) as failure:
            self._end(flight, failure if isinstance(failure, PeerError) else TransferFailed(str(failure)))
            return
        if ended:
            self._end(flight, None)
        else:
            self._flights.append(flight)
            read.interrupt_with(self._wake)

    def _poll(self) -> None:
        now = time.monotonic()
        for flight in self._flights.copy():
            try:
                if self._agent.poll(flight.handle, flight.source.agent):
                    self._landed(flight, None)
                elif flight.read is not None and flight.read.stopped:
                    flight.asked_to_end_at = flight.asked_to_end_at or now
                    if now - flight.asked_to_end_at > PATIENCE_S:
                        self._cut_off(f"{flight.source.region.address}: cut off, a read did not end")
                        return
            except PeerError as error:
                self._landed(flight, error)

    def _landed(self, flight: _Flight, error: PeerError | None) -> None:
        if flight in self._flights:
            self._flights.remove(flight)
            self._end(flight, error)

    def _end(self, flight: _Flight, error: PeerError | None) -> None:
        """Nothing of it will arrive any more."""
        if flight.handle:
            self._agent.release(flight.handle)
        self._local.deregister(flight.registration)
        if isinstance(error, PeerLost):
            for source in self._sources_of(flight.source.agent):
                self._forget(source, error)
        if flight.read is None:
            self._met(flight.source, error)
        else:
            flight.read.finish(error)
        self._hang_up_if_unused(flight.source.agent)

    # The ways to peers.

    def _meet(self, source: Source) -> Source:
        for old in list(self._sources.values()):
            if not old.waiting and source.used_at - old.used_at > IDLE_SOURCE_S:
                self._forget(old)
        self._sources[source.key] = source
        ask(source.region, lambda told: self._tell(partial(self._described, source, told)))
        return source

    def _described(self, source: Source, told: KvDescription | PeerError) -> None:
        if self._sources.get(source.key) is not source:
            return
        try:
            if isinstance(told, PeerError):
                raise told
            self._open_again()
            check_one_sided(told, self._transport, self._agent.uses_rdma)
            if self._is_in_flight(told.agent) and not self._sources_of(told.agent):
                raise PeerLost(f"{source.region.address}: the connection broke, and is still being ended")
            source.description = told
            self._agent.meet(told.agent, told.metadata)
            scratch = self._local.scratch.slice(0, min(HELLO_BYTES, told.num_bytes))
            handle, ended = self._agent.start(told.agent, told.base, told.device, scratch)
        except PeerError as error:
            self._met(source, error)
            return
        source.stage = Stage.MEETING
        flight = _Flight(source, handle, time.monotonic())
        if ended:
            self._end(flight, None)
        else:
            self._flights.append(flight)

    def _met(self, source: Source, error: PeerError | None) -> None:
        if error is not None:
            self._forget(source, error)
            return
        source.stage = Stage.READY
        while source.waiting and source.stage is Stage.READY:
            self._post(source, source.waiting.popleft())

    def _forget(self, source: Source, reason: PeerError | None = None) -> None:
        """The next read of it asks anew."""
        if self._sources.get(source.key) is source:
            del self._sources[source.key]
        self._hang_up_if_unused(source.agent)
        source.end(reason or PeerLost(f"{source.region.address}: forgotten"))

    def _sources_of(self, agent: str) -> list[Source]:
        return [source for source in self._sources.values() if source.agent == agent]

    def _is_in_flight(self, agent: str) -> bool:
        return any(flight.source.agent == agent for flight in self._flights)

    def _hang_up_if_unused(self, agent: str) -> None:
        """Not before the last read has ended: of those from a peer it forgot, NIXL says nothing more."""
        if agent and not self._sources_of(agent) and not self._is_in_flight(agent):
            self._agent.forget(agent)

    def _cut_off(self, problem: str) -> None:
        """Closes the agent, which ends every read."""
        flights, self._flights = self._flights, []
        sources, self._sources = list(self._sources.values()), {}
        for flight in flights:
            self._agent.release(flight.handle)
        self._agent.close()
        for flight in flights:
            if flight.read is not None:
                flight.read.finish(TransferFailed(problem))
        for source in sources:
            source.end(TransferFailed(problem))
        if not self._closing:
            logger.warning("%s; %d reads ended with it", problem, len(flights))

    def _open_again(self) -> None:
        """After a cut. Raises TransferFailed."""
        if self._agent.closed:
            try:
                self._agent = self._open_agent()
                self._local.move_to(self._agent)
            except (InvalidField, ValueError) as failure:
                raise TransferFailed(str(failure)) from failure
