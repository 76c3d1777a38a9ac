"""The front door: the gRPC service `Router`.

A request that cannot be served, or that fails before its first message, ends as a status with details; one
that fails later ends with a message whose `finish` holds the failure, so that its trail reaches the client.
The id is in every message, and in the initial metadata from the moment of admission: a caller may cancel
before the first token. So may a resume token be: a caller whose router dies then goes on at another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from diptych.domain.errors import DeadlineExceeded
from diptych.domain.ids import RequestId, WorkerId
from diptych.domain.records import WorkerRecord
from diptych.rpc.failpoint import failpoint
from diptych.v1 import common_pb2, router_pb2
from diptych.v1.router_pb2_grpc import RouterServicer as Base
from services.router import wire
from services.router.calls import ClientCall, Context, Metadata
from services.router.decisions import Reason, WorkerRef
from services.router.loop import RouterLoop
from services.router.model import ServedModel
from services.router.requests import LiveRequest, Piece
from services.router.tokens import Claims, ResumeTokens
from services.router.validate import Validator

REQUEST_ID: Final = "diptych-request-id"
"""Key of the initial metadata."""
RESUME_TOKEN: Final = "diptych-resume-token-bin"
"""Another."""


class RouterServicer(Base):
    """See the proto for each call. `peers` and `store_available` tell what the registry last said."""

    def __init__(
        self,
        worker_id: WorkerId,
        model: ServedModel,
        validator: Validator,
        loop: RouterLoop,
        tokens: ResumeTokens,
        *,
        peers: Callable[[], Sequence[WorkerRecord]],
        store_available: Callable[[], bool],
        slow_client_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._model = model
        self._validator = validator
        self._loop = loop
        self._tokens = tokens
        self._peers = peers
        self._store_available = store_available
        self._slow_client_s = slow_client_s

    async def Generate(  # type: ignore[override]  # noqa: N802  # the form that writes to its context itself
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> None:
        """Streams one request's tokens; ends it everywhere when its client goes."""
        failpoint("router.received")
        call = ClientCall(context, request.heartbeat_s, self._slow_client_s)
        checked = await call.waiting(self._validator.check(request))
        live = self._loop.admit(checked)
        try:
            failpoint("router.admitted")
            await call.begin(self._metadata(live))
            if call.heartbeat_s:  # at once: who has its token can go on elsewhere from now on
                await self._write(live, Piece(0), call)
            await self._relay(live, call)
            failpoint("router.answered")
        finally:
            self._loop.hang_up(live)

    async def Attach(  # type: ignore[override]  # noqa: N802  # as Generate
        self, request: router_pb2.AttachRequest, context: Context
    ) -> None:
        """Goes on with a request whose router is gone; ends it everywhere when its client goes."""
        failpoint("router.attach")
        call = ClientCall(context, request.heartbeat_s, self._slow_client_s)
        claims = self._tokens.read(request.resume_token, request.tenant)
        attaching = self._loop.attachments.attach(claims, request.next_index, request.turn)
        live = await call.waiting(attaching)
        try:
            await call.begin(self._metadata(live))
            # At once: from now on the caller knows that it may be gone for as long again.
            await self._write(live, Piece(request.next_index), call)
            await self._relay(live, call, has_told=True)
        finally:
            self._loop.hang_up(live)

    def _metadata(self, live: LiveRequest) -> Metadata:
        told: Metadata = ((REQUEST_ID, live.request_id),)
        return (*told, (RESUME_TOKEN, self._token(live, live.ref))) if live.ref else told

    def _token(self, live: LiveRequest, ref: WorkerRef) -> bytes:
        return self._tokens.mint(Claims(live.request_id, live.checked.tenant, ref))

    async def _relay(self, live: LiveRequest, call: ClientCall, *, has_told: bool = False) -> None:
        """Every piece to its client. Raises what the request failed with before it `has_told` any of it."""
        finish: common_pb2.Finish | None = None
        while finish is None:
            piece = await live.next(call.heartbeat_s)
            finish = piece.finish
            if finish is not None and not has_told and _has_only_failed(piece, finish):
                raise live.error or wire.error_of(finish.failure)
            await self._write(live, piece, call)
            has_told = has_told or bool(piece.tokens or piece.text)

    async def _write(self, live: LiveRequest, piece: Piece, call: ClientCall) -> None:
        failpoint("router.write")
        token = b""
        if live.ref is not None and live.ref != live.told:
            live.told, token = live.ref, self._token(live, live.ref)
        try:
            await call.write(wire.piece_message(live, piece, token))
        except DeadlineExceeded:
            self._loop.cancel(live.request_id, Reason.SLOW_CLIENT)
            raise

    async def Cancel(  # noqa: N802
        self, request: router_pb2.CancelRequest, context: Context
    ) -> router_pb2.CancelResponse:
        """Ends a request of the same tenant; its stream gets the last word with reason ABORT."""
        live = self._loop.live.get(RequestId(request.request_id))
        found = live is not None and live.checked.tenant == request.tenant and not live.ended
        if found:
            self._loop.cancel(RequestId(request.request_id), Reason.CANCEL_ASKED)
        return router_pb2.CancelResponse(found=found)

    async def Status(  # noqa: N802
        self, request: router_pb2.StatusRequest, context: Context
    ) -> router_pb2.StatusResponse:
        """The live set, medians, and every worker of the registry."""
        loop = self._loop
        return router_pb2.StatusResponse(
            router_id=self._worker_id,
            workers=[wire.worker_message(peer) for peer in self._peers()],
            num_live=len(loop.live),
            num_finished=loop.num_finished,
            store_available=self._store_available(),
            ttft_p50_s=loop.recent.ttft_p50_s,
            tpot_p50_s=loop.recent.tpot_p50_s,
            fallbacks=wire.fallback_messages(loop.policy.counters),
        )

    async def ListModels(  # noqa: N802
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        """The one model that is served. Context and fingerprint are those of its decode workers, once
        known."""
        bounds = self._loop.policy.bounds
        workers = [peer for peer in self._peers() if peer.role.decodes and peer.model == self._model.name]
        model = router_pb2.Model(
            name=self._model.name,
            max_context=bounds.max_context if bounds else 0,
            fingerprint=workers[0].fingerprint if workers else "",
        )
        return router_pb2.ListModelsResponse(models=[model])


def _has_only_failed(piece: Piece, finish: common_pb2.Finish) -> bool:
    return finish.reason == common_pb2.FINISH_REASON_ERROR and not piece.tokens and not piece.text
