"""What the policy is told and what it decides: plain values between the brain and the hands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diptych.domain.errors import DiptychError
from diptych.domain.ids import Cell, ChunkHash, Epoch, RequestId, WorkerId
from diptych.domain.records import WorkerRecord


class Reason(Enum):
    """Why something went another way than straight to a worker and back. A closed set: these are metric
    labels."""

    # A request that was not taken, or not kept.
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_WORKER = "no_decode_worker"
    TOO_LARGE = "too_large"
    # A request that left its worker for another.
    WORKER_LOST = "decode_lost"
    WORKER_SILENT = "decode_silent"
    WORKER_REPLACED = "decode_replaced"
    WORKER_REFUSED = "decode_refused_session"
    HANDED_BACK = "decode_handed_back"
    # A request that came from another router, with its client.
    ROUTER_LOST = "router_lost"
    # A request that was given up.
    MOVED_TOO_OFTEN = "moved_too_often"
    BROKEN_STREAM = "broken_stream"
    SLOW_CLIENT = "slow_client"
    CLIENT_GONE = "client_gone"
    CANCEL_ASKED = "cancel_asked"
    CANCEL_UNCONFIRMED = "cancel_unconfirmed"


@dataclass(frozen=True, slots=True, order=True)
class WorkerRef:
    """One start of one worker. Whatever names another epoch of it is stale."""

    worker_id: WorkerId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.epoch:x}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that wants a worker. `num_tokens` are those of the prompt, `prefix` its whole chunks,
    salted."""

    request_id: RequestId
    num_tokens: int
    max_tokens: int
    priority: int = 0
    prefix: tuple[ChunkHash, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the policy may do; see RouterSettings for each. Durations in seconds."""

    model: str
    cell: Cell
    max_queue: int
    max_wait_s: float
    max_share: float
    max_overcommit: float
    output_reserve: int
    prefix_slack: int
    cancel_wait_s: float
    max_moves: int
    moves_per_s: float
    move_burst: int
    redial_min_s: float
    redial_max_s: float


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a session with this worker."""

    ref: WorkerRef
    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the session: the worker is gone, replaced, or left without requests of ours."""

    ref: WorkerRef
    address: str


@dataclass(frozen=True, slots=True)
class Place:
    """Submit this request, with what it has put out so far, to this worker. `moved`: why it left the last
    one."""

    request_id: RequestId
    ref: WorkerRef
    moved: Reason | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the worker that nobody wants this request any more."""

    request_id: RequestId
    ref: WorkerRef


@dataclass(frozen=True, slots=True)
class End:
    """The request is over without a last word of its worker's. `error` is the first cause."""

    request_id: RequestId
    error: DiptychError


Decision = Dial | HangUp | Place | Abort | End
