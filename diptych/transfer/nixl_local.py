"""Local memory that reads land in, as the reading agent has it registered.

Rings are prepared once. What was not prepared is registered for its read alone.
"""

from __future__ import annotations

import ctypes

from diptych.domain.ports import MemorySpan
from diptych.transfer.nixl_agent import Agent, Registration

SCRATCH_BYTES = 4096


class LocalMemory:
    """Belongs to the reader's thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._prepared: list[MemorySpan] = []
        owner = ctypes.create_string_buffer(SCRATCH_BYTES)
        self.scratch = MemorySpan(ctypes.addressof(owner), SCRATCH_BYTES, owner=owner)
        """For reads whose bytes nobody wants."""
        self.prepare(self.scratch)

    def prepare(self, memory: MemorySpan) -> None:
        """Registers `memory` until the agent is closed. Raises ValueError when it can't be."""
        self._agent.register(memory)
        self._prepared.append(memory)

    def register(self, memory: MemorySpan) -> Registration | None:
        """Makes sure that a read may land in `memory`. What it returns is to be deregistered after the read.

        Raises ValueError when it can't be registered.
        """
        if any(_contains(prepared, memory) for prepared in self._prepared):
            return None
        return self._agent.register(memory)

    def deregister(self, registration: Registration | None) -> None:
        if registration is not None:
            self._agent.deregister(registration)

    def move_to(self, agent: Agent) -> None:
        """Registers all that was prepared with another agent; the last one was closed."""
        self._agent = agent
        for memory in self._prepared:
            agent.register(memory)


def _contains(outer: MemorySpan, inner: MemorySpan) -> bool:
    if outer.device != inner.device:
        return False
    return outer.address <= inner.address and (
        inner.address + inner.num_bytes <= outer.address + outer.num_bytes
    )
