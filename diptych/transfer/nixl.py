"""The KV channel over NIXL: one-sided reads, by RDMA, NVLink or the kernel, without a copy on either side.

    register ─▶ MemoryServer (agent with a progress thread; port that describes regions)
    read ─────▶ Reader (its own thread and agent) ── Describe ─▶ the peer's MemoryServer
                   ◀═══════════ bytes, fetched from the peer's memory ══════

Two agents, so that the reading one can be closed to end a read that hangs (`nixl_reader`) while our own
memory stays readable. Nothing is encrypted, so it does not go with TLS.
"""

from __future__ import annotations

import ctypes.util
import secrets
from collections.abc import Callable
from functools import partial

from diptych.domain.ports import MemorySpan, Region, RemotePiece
from diptych.transfer.address import bracketed, check_dialable
from diptych.transfer.nixl_agent import Agent
from diptych.transfer.nixl_library import Transport, has_rdma, ucx_configurations
from diptych.transfer.nixl_reader import Reader
from diptych.transfer.nixl_server import MemoryServer
from diptych.transfer.reads import PendingRead, Reads

KIND = "nixl"


class NixlChannel:
    """A `KvChannel` that serves and reads over NIXL."""

    def __init__(
        self, host: str, port: int, advertise_host: str | None = None, transport: Transport = "auto"
    ) -> None:
        """Listens at once. `advertise_host` is what peers dial, where that is not `host`.

        Raises InvalidField when NIXL is not there or does not start, and when the address can't be listened
        on or dialled.
        """
        check_dialable(host, advertise_host)
        configurations = ucx_configurations(transport, host, has_rdma())
        name = f"diptych-{secrets.token_hex(8)}"
        self._reads = Reads(KIND, _has_device)
        self._reader = Reader(partial(Agent, f"{name}-r", configurations, False), transport)
        try:
            self._server = MemoryServer(
                bracketed(host), port, partial(Agent, name, configurations, True), _has_device
            )
        except BaseException:
            self._reader.close()
            raise
        self._address = f"{bracketed(advertise_host or host)}:{self._server.port}"

    @property
    def kind(self) -> str:
        return KIND

    @property
    def address(self) -> str:
        """Where peers ask for regions, "host:port"."""
        return self._address

    def register(self, memory: MemorySpan) -> Region:
        """Lets whoever learns the region's key read `memory` until `close`. Raises ValueError for memory that
        is not there or can't be registered."""
        self._reads.check_open()
        return Region(KIND, self._address, self._server.add(memory), memory.num_bytes)

    def prepare(self, memory: MemorySpan) -> None:
        """Registers memory that reads will land in, once for all of them."""
        self._reads.check_open()
        self._reader.prepare(memory)

    def read(
        self, remote: RemotePiece, local: MemorySpan, deadline_s: float, on_done: Callable[[], None]
    ) -> PendingRead:
        """Starts a read; raises as `Reads.open`."""
        read = self._reads.open(remote, local, deadline_s, on_done)
        self._reader.submit(read)
        return read

    def close(self) -> None:
        """Ends all reads, refuses new ones, and forgets all regions. Idempotent; leaves no thread."""
        self._reads.stop()
        self._server.close()
        self._reader.close()
        self._reads.close()


def _has_device(device: str) -> bool:
    return device == "cpu" or (device.startswith("cuda") and ctypes.util.find_library("cuda") is not None)
