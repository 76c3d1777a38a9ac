"""Domain values as the messages that the router sends, and the failures that it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from diptych.domain.errors import Cancelled, DiptychError, named_error
from diptych.domain.records import Role, WorkerRecord
from diptych.rpc.inspection import link_messages
from diptych.rpc.params import params_to_proto
from diptych.v1 import common_pb2, decode_pb2, router_pb2, worker_pb2
from services.router.decisions import Reason
from services.router.requests import LiveRequest, Piece

_ROLES: Mapping[Role, worker_pb2.Role.ValueType] = {
    Role.ROUTER: worker_pb2.ROLE_ROUTER,
    Role.PREFILL: worker_pb2.ROLE_PREFILL,
    Role.DECODE: worker_pb2.ROLE_DECODE,
    Role.BOTH: worker_pb2.ROLE_BOTH,
    Role.CACHE: worker_pb2.ROLE_CACHE,
}


def submit_message(live: LiveRequest) -> decode_pb2.Submit:
    """Everything but the tokens."""
    checked = live.checked
    return decode_pb2.Submit(
        request_id=live.request_id,
        tenant=checked.tenant,
        cache_salt=checked.cache_salt,
        params=params_to_proto(checked.params),
        num_output=len(live.output),
        priority=checked.priority,
        placement=live.num_moves + 1,
    )


def piece_message(live: LiveRequest, piece: Piece, resume_token: bytes) -> router_pb2.GenerateResponse:
    """One message of a client's stream. `resume_token` is empty where the client has it."""
    return router_pb2.GenerateResponse(
        request_id=live.request_id,
        index=piece.index,
        tokens=piece.tokens,
        text=piece.text,
        finish=piece.finish,
        resume_token=resume_token,
    )


def finish_message(live: LiveRequest, finish: common_pb2.Finish) -> common_pb2.Finish:
    """A worker's last word, with what only the router knows added to its trail."""
    trail = finish.trail
    trail.decode_worker = trail.decode_worker or live.worker_id
    trail.num_prompt_tokens = trail.num_prompt_tokens or len(live.checked.tokens)
    trail.num_output_tokens = len(live.output)
    trail.num_resumed = live.num_moves
    trail.seed = live.checked.params.seed
    trail.fallbacks.extend(fallback_messages(live.fallbacks))
    return finish


def finish_for(reason: int) -> common_pb2.Finish:
    """A last word that no worker said: `reason` is a FinishReason."""
    return common_pb2.Finish(reason=common_pb2.FinishReason.ValueType(reason), trail=common_pb2.Trail())


def superseded() -> common_pb2.Finish:
    """The last word to a client whose request another call has attached to."""
    finish = finish_for(common_pb2.FINISH_REASON_ABORT)
    finish.failure.kind, finish.failure.message = "Cancelled", "superseded: another call has attached to it"
    return finish


def finish_for_error(error: DiptychError) -> common_pb2.Finish:
    """A last word for a request that failed, or that its caller gave up."""
    if isinstance(error, Cancelled):
        return finish_for(common_pb2.FINISH_REASON_ABORT)
    finish = finish_for(common_pb2.FINISH_REASON_ERROR)
    finish.failure.CopyFrom(
        common_pb2.Failure(kind=type(error).__name__, message=str(error), retry=error.retry)
    )
    return finish


def error_of(failure: common_pb2.Failure) -> DiptychError:
    """The error that a worker's failure names."""
    return named_error(failure.kind, failure.message or failure.kind or "the decode worker gave no reason")


def fallback_messages(counters: Counter[Reason]) -> list[common_pb2.Fallback]:
    """Counters in the order of `Reason`."""
    return [common_pb2.Fallback(reason=r.value, count=counters[r]) for r in Reason if counters[r]]


def worker_message(record: WorkerRecord) -> worker_pb2.WorkerStatus:
    """A worker as the registry knows it."""
    load = record.load
    return worker_pb2.WorkerStatus(
        worker_id=record.worker_id,
        role=_ROLES[record.role],
        epoch=record.epoch,
        address=record.rpc_address,
        model=record.model,
        fingerprint=record.fingerprint,
        load=worker_pb2.Load(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            blocks_free=load.free_blocks,
            blocks_owned=max(0, load.total_blocks - load.free_blocks),
            blocks_total=load.total_blocks,
            tpot_s=load.tpot_s,
            ttft_s=load.ttft_s,
        ),
        links=link_messages(load.links),
    )
