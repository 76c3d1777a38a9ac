"""What the two processes of a decode worker tell each other: one batch each way a step, as MessagePack.

The lists of an inbox are taken in the order of its fields, so that a cancel overtakes nothing of its own
request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.domain.engine_report import EngineLoad, EngineReady, FailureInfo
from diptych.domain.fallbacks import Fallback
from diptych.domain.ids import Attempt, Epoch, RequestId, WorkerId
from diptych.domain.ports import Region, RemotePiece
from diptych.domain.sampling import SamplingParams

NO_ATTEMPT = Attempt(0)


@dataclass(frozen=True, slots=True)
class Submit:
    """A request with all its tokens: prompt first, then `num_output` tokens that the client already has."""

    request_id: RequestId
    tenant: str
    cache_salt: str
    tokens: list[int]
    num_output: int
    params: SamplingParams
    priority: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants more of it: the caller gave up, or a stop string ended its text."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class BeginAsked:
    """A prefill worker asks for a job; `ticket` names its call."""

    ticket: int
    request_id: RequestId
    prefill_worker: WorkerId
    fingerprint: str
    too_slow: bool = False
    """Whether nothing may be read from it: its link is past the bound."""
    num_attempts: int = 0
    """Attempts that had begun when the job was posted."""
    slow_channels: list[str] = field(default_factory=list)
    """Those over which the link is past the bound."""


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A chunk may be read now."""

    request_id: RequestId
    attempt: Attempt
    index: int
    start: int
    num_tokens: int
    piece: RemotePiece
    digest: bytes
    others: list[Region] = field(default_factory=list)
    """The same memory over its owner's other channels."""


@dataclass(frozen=True, slots=True)
class ManifestReceived:
    """All that must be there for the request to run."""

    request_id: RequestId
    attempt: Attempt
    num_chunks: int
    num_tokens: int
    fingerprint: str
    first_token: int
    prefill_s: float
    num_cached_tokens: int
    num_borrowed_tokens: int = 0
    fallbacks: dict[Fallback, int] = field(default_factory=dict)
    computed_at: float = 0.0
    """When its last chunk had been computed, by our clock and without its way here. 0: not told."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """`kind` is a class of the error tree."""

    request_id: RequestId
    attempt: Attempt
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class JobLost:
    """Nobody will begin a job that is on the bus, or was."""

    request_id: RequestId
    reason: Fallback


@dataclass(frozen=True, slots=True)
class AttemptAlive:
    """A sign of life of an attempt."""

    request_id: RequestId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the I/O process knows of the world: is there anybody to prefill, and a bus to ask them on."""

    num_prefill_workers: int
    store_available: bool
    num_too_slow: int = 0
    """Prefill workers beside those, whose links must not be used."""


@dataclass(frozen=True, slots=True)
class ProbeAsked:
    """Measure the way to a peer by reading its probe region; `large`: the bandwidth as well."""

    worker_id: WorkerId
    epoch: Epoch
    region: Region
    large: bool = False


@dataclass(frozen=True, slots=True)
class DecodeInbox:
    """What the engine is told in one turn."""

    surroundings: list[Surroundings] = field(default_factory=list)
    submits: list[Submit] = field(default_factory=list)
    begins: list[BeginAsked] = field(default_factory=list)
    chunks: list[ChunkReady] = field(default_factory=list)
    manifests: list[ManifestReceived] = field(default_factory=list)
    alive: list[AttemptAlive] = field(default_factory=list)
    failures: list[AttemptFailed] = field(default_factory=list)
    unposted: list[RequestId] = field(default_factory=list)
    """Jobs that the bus did not take."""
    lost_jobs: list[JobLost] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    drop_cache: list[bool] = field(default_factory=list)
    """Not empty: forget cached prefixes."""
    probes: list[ProbeAsked] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    """Questions of how the engine is now; the next load answers the newest."""


@dataclass(frozen=True, slots=True)
class TrailInfo:
    """Where a request's time went, as the engine saw it. Durations in seconds."""

    prefill_worker: str
    path: str
    path_reason: str
    attempts: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_chunks: int
    kv_bytes: int
    channel: str
    queue_s: float
    prefill_s: float
    handoff_s: float
    exposed_s: float
    decode_s: float
    ttft_s: float
    num_preempted: int
    fallbacks: dict[Fallback, int]
    num_borrowed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishInfo:
    """`reason` is "stop", "length", "abort" or "error"."""

    reason: str
    trail: TrailInfo
    failure: FailureInfo | None = None


@dataclass(frozen=True, slots=True)
class TokensOut:
    """One request's part of a step. `index` is the output position of its first token."""

    request_id: RequestId
    index: int
    tokens: list[int]
    finish: FinishInfo | None = None


@dataclass(frozen=True, slots=True)
class BeginAnswer:
    """The attempt that was minted, with all it takes to prefill, or a refusal."""

    ticket: int
    attempt: Attempt = NO_ATTEMPT
    tokens: list[int] = field(default_factory=list)
    params: SamplingParams | None = None
    banned: list[int] = field(default_factory=list)
    num_held: int = 0
    cache_root: bytes = b""
    timeout_s: float = 0.0
    refusal: FailureInfo | None = None


@dataclass(frozen=True, slots=True)
class JobPosted:
    """A job for the bus."""

    request_id: RequestId
    num_tokens: int
    num_held: int
    priority: int
    timeout_s: float
    num_attempts: int = 0


@dataclass(frozen=True, slots=True)
class JobWithdrawn:
    """Nobody needs this job any more."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Our read of a chunk has landed; its source may go."""

    request_id: RequestId
    attempt: Attempt
    index: int


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """`reason` is empty when every chunk landed."""

    request_id: RequestId
    attempt: Attempt
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """What a round of probing gave: seconds of each small read, bytes a second of the large one (0: none).
    Nothing at all: there was no time for it."""

    worker_id: WorkerId
    epoch: Epoch
    rtts: list[float] = field(default_factory=list)
    bytes_per_s: float = 0.0
    error: str = ""
    channel: str = ""


@dataclass(frozen=True, slots=True)
class DecodeOutbox:
    """What the engine says after one turn."""

    ready: EngineReady | None = None
    tokens: list[TokensOut] = field(default_factory=list)
    begins: list[BeginAnswer] = field(default_factory=list)
    posts: list[JobPosted] = field(default_factory=list)
    withdrawals: list[JobWithdrawn] = field(default_factory=list)
    chunks_done: list[ChunkDone] = field(default_factory=list)
    ended: list[AttemptEnded] = field(default_factory=list)
    load: EngineLoad | None = None
    probed: list[ProbeDone] = field(default_factory=list)
