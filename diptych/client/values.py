"""What the router answers, as frozen dataclasses, and how each is read from its message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.domain import errors
from diptych.domain.errors import DiptychError
from diptych.domain.records import Role
from diptych.v1 import common_pb2, router_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Trail:
    """Where a request's time went and who served it. Durations in seconds, meaning as in `common.proto`."""

    decode_worker: str = ""
    prefill_worker: str = ""
    path: str = ""
    """"disaggregated", "local", or empty where the request never came so far."""
    path_reason: str = ""
    attempts: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_borrowed_tokens: int = 0
    """Those of the cached ones that were read from a cache service."""
    num_output_tokens: int = 0
    num_chunks: int = 0
    kv_bytes: int = 0
    channel: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    exposed_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)
    num_resumed: int = 0
    num_preempted: int = 0
    seed: int = 0

    @property
    def tpot_s(self) -> float:
        """Mean seconds from one output token to the next; 0 where there is only one."""
        return self.decode_s / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended. `reason` is "stop", "length" or "abort"; an end by error is raised instead."""

    reason: str
    stop: str
    """The stop string that ended the text, if one did."""
    trail: Trail


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a stream: new tokens from position `index` on, and the text that is certain by now."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    text: str
    finish: Finish | None = None
    """In the last piece, and in no other."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One registered process, as the router sees it."""

    worker_id: str
    role: Role | None
    """None: a role that this client does not know."""
    epoch: int
    address: str
    model: str
    pid: int
    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_total: int
    ttft_s: float
    tpot_s: float
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """The router and every worker that it knows."""

    router_id: str
    workers: tuple[WorkerInfo, ...]
    num_live: int
    num_finished: int
    store_available: bool
    ttft_p50_s: float
    tpot_p50_s: float
    fallbacks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be asked for by `name`, with the most positions of prompt and output together."""

    name: str
    max_context: int
    fingerprint: str


def read_piece(message: router_pb2.GenerateResponse) -> Piece:
    """Raises the error that ended the request, where one did."""
    finish = None
    if message.HasField("finish"):
        if message.finish.reason == common_pb2.FINISH_REASON_ERROR:
            raise read_failure(message.finish.failure)
        finish = _read_finish(message.finish)
    return Piece(message.request_id, message.index, tuple(message.tokens), message.text, finish)


def read_failure(failure: common_pb2.Failure) -> DiptychError:
    """The error that a `Failure` names; a class that is not known here comes as its root."""
    kind = getattr(errors, failure.kind, None)
    message = failure.message or failure.kind or "the request failed without a reason"
    if kind is errors.InvalidField:
        name, _, problem = message.partition(": ")
        return errors.InvalidField(name, problem)
    if isinstance(kind, type) and issubclass(kind, DiptychError):
        return kind(message)
    return DiptychError(message)


def read_status(message: router_pb2.StatusResponse) -> RouterStatus:
    """The typed form of a status answer."""
    return RouterStatus(
        message.router_id,
        tuple(_read_worker(worker) for worker in message.workers),
        message.num_live,
        message.num_finished,
        message.store_available,
        message.ttft_p50_s,
        message.tpot_p50_s,
        _counts(message.fallbacks),
    )


def read_models(message: router_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """The typed form of a list of models."""
    return tuple(ModelInfo(model.name, model.max_context, model.fingerprint) for model in message.models)


def _read_finish(finish: common_pb2.Finish) -> Finish:
    reason = common_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    return Finish(reason, finish.stop, _read_trail(finish.trail))


def _read_trail(trail: common_pb2.Trail) -> Trail:
    path = common_pb2.PrefillPath.Name(trail.path).removeprefix("PREFILL_PATH_").lower()
    return Trail(
        decode_worker=trail.decode_worker,
        prefill_worker=trail.prefill_worker,
        path="" if path == "unspecified" else path,
        path_reason=trail.path_reason,
        attempts=trail.attempts,
        num_prompt_tokens=trail.num_prompt_tokens,
        num_cached_tokens=trail.num_cached_tokens,
        num_borrowed_tokens=trail.num_borrowed_tokens,
        num_output_tokens=trail.num_output_tokens,
        num_chunks=trail.num_chunks,
        kv_bytes=trail.kv_bytes,
        channel=trail.channel,
        queue_s=trail.queue_s,
        prefill_s=trail.prefill_s,
        handoff_s=trail.handoff_s,
        exposed_s=trail.exposed_s,
        decode_s=trail.decode_s,
        ttft_s=trail.ttft_s,
        fallbacks=_counts(trail.fallbacks),
        num_resumed=trail.num_resumed,
        num_preempted=trail.num_preempted,
        seed=trail.seed,
    )


def _read_worker(worker: worker_pb2.WorkerStatus) -> WorkerInfo:
    load = worker.load
    return WorkerInfo(
        worker.worker_id,
        _read_role(worker.role),
        worker.epoch,
        worker.address,
        worker.model,
        worker.pid,
        load.num_running,
        load.num_waiting,
        load.blocks_total - load.blocks_free - load.blocks_cached,
        load.blocks_total,
        load.ttft_s,
        load.tpot_s,
        _counts(worker.counters),
    )


def _read_role(role: worker_pb2.Role.ValueType) -> Role | None:
    names = {value.value for value in Role}
    # An enum is open on the wire: a newer router may send a number that has no name here.
    name = worker_pb2.Role.Name(role) if role in worker_pb2.Role.values() else ""
    word = name.removeprefix("ROLE_").lower()
    return Role(word) if word in names else None


def _counts(counters: Iterable[common_pb2.Fallback]) -> dict[str, int]:
    return {counter.reason: counter.count for counter in counters}
