"""One NIXL agent: registered memory, the peers it knows, and reads. Errors are the domain's.

A *serving* agent has a progress thread, which sleeps until UCX has something for it. A *reading* one has
none: who waits for its reads polls them. Neither takes CPU time while nothing happens. An agent is used by
one thread at a time.

**The end of a read.** NIXL frees the handle of an unfinished read when asked to, yet the bytes still arrive
(seen: all of them, after `release` and after `remove_remote_agent`). Only two things make sure that none
will: the read ended by itself, or the agent is closed, which tears the connections down before it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from diptych.domain.errors import InvalidField, PeerError, PeerLost, TransferFailed
from diptych.domain.ports import MemorySpan
from diptych.transfer.nixl_library import WITHOUT_TCP, bindings

BACKEND = "UCX"
_SLEEP_US = 100_000
"""Longest sleep of the progress thread: NIXL says that UCX may forget to wake it."""
_ALWAYS = "KEEPALIVE_INTERVAL=inf"
"""UCX's own pings to a peer have to be answered before the next read counts as ended: a stopped peer's memory
could be read, and the read would hang. Every read has its deadline, and a death closes the connection."""

Registration = Any
"""NIXL's list of what was registered together."""
Handle = int


class Agent:
    """See the module."""

    def __init__(self, name: str, configurations: Sequence[str], serves: bool) -> None:
        """Takes the first configuration of UCX that starts. Raises InvalidField when none does."""
        self.name = name
        self._nixl = nixl = bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.useListenThread = False
        config.captureTelemetry = False
        config.pthrDelay = _SLEEP_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT if serves else nixl.NIXL_THREAD_SYNC_NONE
        problem: Exception | None = None
        for self.configuration in configurations:
            try:
                self._agent: Any = nixl.nixlAgent(name, config)
                options = {"engine_config": f"{self.configuration},{_ALWAYS}"}
                self._backends = [self._agent.createBackend(BACKEND, options)]
                return
            except Exception as failure:  # noqa: BLE001  # NIXL raises bare RuntimeErrors as well
                problem = failure
        raise InvalidField("kv channel", f"UCX does not start here: {problem}") from problem

    @property
    def uses_rdma(self) -> bool:
        """Whether it was told to do without TCP, which needs RDMA devices."""
        return self.configuration == WITHOUT_TCP

    @property
    def closed(self) -> bool:
        return self._agent is None

    def register(self, memory: MemorySpan) -> Registration:
        """Makes memory known to the hardware. Raises ValueError when it can't be."""
        descriptors = self._nixl.nixlRegDList(
            self._kind(memory.device), [(memory.address, memory.num_bytes, _device_id(memory.device), "")]
        )
        try:
            self._agent.registerMem(descriptors, self._backends)
        except Exception as failure:
            raise ValueError(f"memory on {memory.device} can't be registered: {failure}") from failure
        return descriptors

    def deregister(self, registration: Registration) -> None:
        self._agent.deregisterMem(registration, self._backends)

    def metadata(self, registration: Registration) -> bytes:
        """What a peer needs to connect and to read what was registered."""
        return bytes(self._agent.getLocalPartialMD(registration, True, self._backends))

    def meet(self, name: str, metadata: bytes) -> None:
        """Takes a peer's metadata, before its memory is read. Raises PeerError."""
        with _errors(self._nixl, name):
            met = self._agent.loadRemoteMD(metadata).decode()
        if met != name:
            self.forget(met)
            raise TransferFailed(f"{name} described itself as {met}")

    def forget(self, name: str) -> None:
        """Hangs up on a peer. Unknown ones are ignored. Reads from it that are under way are not ended."""
        with contextlib.suppress(Exception):
            self._agent.invalidateRemoteMD(name)

    def start(self, peer: str, address: int, device: str, local: MemorySpan) -> tuple[Handle, bool]:
        """Starts to read as many bytes as `local` has from `address` of a peer. True: and has ended.

        `local` must be inside registered memory. Raises PeerError, and then no byte will arrive.
        """
        nixl = self._nixl
        ours = self._piece(local.address, local.num_bytes, local.device)
        theirs = self._piece(address, local.num_bytes, device)
        with _errors(nixl, peer):
            # What the kernel has heard of the peer, such as its death, is taken in first.
            self._agent.getNotifs({}, self._backends)
            handle: Handle = self._agent.createXferReq(
                nixl.NIXL_READ, ours, theirs, peer, b"", self._backends
            )
        try:
            with _errors(nixl, peer):
                return handle, self._agent.postXferReq(handle, b"") != nixl.NIXL_IN_PROG
        except PeerError:
            self.release(handle)
            raise

    def poll(self, handle: Handle, peer: str) -> bool:
        """Whether a read has ended. Raises PeerError when it ended badly."""
        with _errors(self._nixl, peer):
            return bool(self._agent.getXferStatus(handle) != self._nixl.NIXL_IN_PROG)

    def release(self, handle: Handle) -> None:
        """Frees the handle of a read that has ended, or right before `close`."""
        with contextlib.suppress(Exception):
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Tears everything down. No read writes any more when this returns. Idempotent."""
        self._agent = None

    def _piece(self, address: int, num_bytes: int, device: str) -> Any:
        return self._nixl.nixlXferDList(self._kind(device), [(address, num_bytes, _device_id(device))])

    def _kind(self, device: str) -> Any:
        return self._nixl.DRAM_SEG if device == "cpu" else self._nixl.VRAM_SEG


def _device_id(device: str) -> int:
    return int(device.partition(":")[2] or 0)


@contextlib.contextmanager
def _errors(nixl: Any, peer: str) -> Iterator[None]:
    try:
        yield
    except nixl.nixlRemoteDisconnectError as failure:
        raise PeerLost(f"{peer}: hung up") from failure
    except Exception as failure:
        raise TransferFailed(f"{peer}: {failure}") from failure
