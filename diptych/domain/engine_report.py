"""What an engine process says of itself, in every kind of worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.domain.audit import Held
from diptych.domain.records import ChannelEndpoint


@dataclass(frozen=True, slots=True)
class FailureInfo:
    """An error that crosses the pair of processes: `kind` is its class in the error tree."""

    kind: str
    message: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Derived from the live set at the moment of sending."""

    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_total: int
    slots_used: int
    slots_total: int
    num_tokens: int = 0
    tpot_s: float = 0.0
    ttft_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    """By reason. `leaked_blocks` is no sum: it is what belonged to nobody at the last idle moment."""
    held: list[Held] = field(default_factory=list)
    """What the engine process holds, bounded."""
    num_held: int = 0
    leak: str = ""
    """What its own check found wrong when it last was idle."""
    look: int = 0
    """The newest question that it answers (`diptych.worker.looks`)."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The first thing an engine says. `error` is what kept it from starting."""

    model: str = ""
    fingerprint: str = ""
    channels: list[str] = field(default_factory=list)
    """Kinds of KV channel that it speaks, best first."""
    endpoints: list[ChannelEndpoint] = field(default_factory=list)
    """Where peers read this worker's KV; none where they read none."""
    max_context: int = 0
    vocab_size: int = 0
    capacity_tokens: int = 0
    error: FailureInfo | None = None
