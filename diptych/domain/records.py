"""What the store holds about workers, jobs, requests and chunks. Plain values; `diptych.store` says where
each lies.

Everything here is soft state: a process that loses the store announces it again, and a reader that finds it
old (another epoch) ignores it. Tokens and KV never pass through the store, so each record stays well under
a kilobyte.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diptych.domain.ids import Attempt, Cell, Epoch, RequestId, Tenant, WorkerId


class Role(Enum):
    """What a registered process does."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Prefill and decode in one: a colocated worker."""
    CACHE = "cache"

    @property
    def prefills(self) -> bool:
        """Whether it takes prefills of others' requests."""
        return self in (Role.PREFILL, Role.BOTH)

    @property
    def decodes(self) -> bool:
        """Whether it takes requests from a router."""
        return self in (Role.DECODE, Role.BOTH)


class Tier(Enum):
    """How far from the device a chunk lies."""

    L1 = "l1"
    """Device memory of a worker."""
    L2 = "l2"
    """Host memory of a cache service."""
    L3 = "l3"
    """Persistent storage behind a cache service."""


@dataclass(frozen=True, slots=True)
class ChannelEndpoint:
    """Where a worker's KV can be read. `kind` is the channel's name; peers dial only what is registered
    here.
    """

    kind: str
    address: str
    wire_version: int = 1
    probe_key: str = ""
    """Hexadecimal key of a region of zeros that peers may read to measure the way here; never KV. Empty:
    none."""
    probe_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """How far a worker is from a peer that it reads from, over one KV channel."""

    worker_id: WorkerId
    epoch: Epoch
    rtt_s: float = 0.0
    """Of a small read. 0: not measured yet."""
    bytes_per_s: float = 0.0
    """Of a large one. 0: not measured yet."""
    age_s: float = 0.0
    """Since it was last measured."""
    too_slow: bool = False
    """Past the bound that the reader was given."""
    used: bool = True
    """False: too slow, and the reader was told not to use such links."""
    channel: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says about itself with each heartbeat; derived from its live set, never counted up and
    down.
    """

    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    """Of the first layer group, as `total_blocks`."""
    total_blocks: int = 0
    queued_prefill_tokens: int = 0
    ttft_s: float = 0.0
    """Recent means; 0 while there is nothing to tell."""
    tpot_s: float = 0.0
    links: tuple[Link, ...] = ()
    """To the workers that it reads from, the slowest first; a few of them."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One registered process. `fingerprint` is that of its KV layout, `capacity_tokens` what its pool can
    hold.
    """

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    cell: Cell
    model: str
    fingerprint: str
    rpc_address: str
    channels: tuple[ChannelEndpoint, ...] = ()
    capacity_tokens: int = 0
    max_context: int = 0
    """Most positions of one sequence, prompt and output together. 0: not told."""
    load: WorkerLoad = WorkerLoad()


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A wish to prefill, on its cell's bus. No tokens and no addresses: whoever claims it looks the decode
    worker up in the registry, dials what is registered there and calls `Begin`.
    """

    request_id: RequestId
    decode_worker: WorkerId
    decode_epoch: Epoch
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    priority: int = 0
    """Lower is sooner. The bus keeps arrival order; decode posts in the order of its own queue."""
    deadline_unix_s: float = 0.0
    """No use after this moment of the store's clock. 0: none."""
    traceparent: str = ""
    """W3C trace context, empty when not traced."""
    num_attempts: int = 0
    """Attempts of the request that had begun when this was posted. Once another has begun, this is late."""


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that is ours until `done`. `deliveries` counts how often the bus gave it to somebody, from 1."""

    entry_id: str
    job: PrefillJob
    deliveries: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Projection of a request, written by the decode worker that owns it.

    Order of two records of one request: by `placement`, then by `version`. A placement has one owner.
    """

    request_id: RequestId
    tenant: Tenant
    state: str
    decode_worker: WorkerId
    decode_epoch: Epoch
    attempt: Attempt
    placement: int = 1
    """Counts the decode workers that the request was given to, from 1; the router raises it when it moves
    one.
    """
    version: int = 1
    """Counts the writes of one placement."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Who holds a chunk, in which tier. Of no use unless that epoch of that worker is alive."""

    worker_id: WorkerId
    epoch: Epoch
    tier: Tier
