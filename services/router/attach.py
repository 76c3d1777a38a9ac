"""Requests on their way to this router: their clients lost the one that had them.

    token read ─▶ session with its worker open ─▶ attach ──▶ worker
                                                        ◀── attached, and more tokens in pieces
    from now on it is ours, as if it had been placed by us      │   its deltas follow on the same session
                                                        ◀── refused: it is not there, or not with that output

Until the worker has answered nothing changes here: where the request is live at this router already, for a
call whose client we do not know to be gone, it stays with that call until then.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from diptych.domain.errors import Cancelled, DiptychError, Internal, PeerLost, Stale, named_error
from diptych.domain.ids import RequestId, Tenant
from diptych.rpc.failpoint import failpoint
from diptych.rpc.params import params_from_proto
from diptych.v1 import decode_pb2
from services.router.decisions import WorkerRef
from services.router.policy import RouterPolicy
from services.router.requests import CheckedRequest, LiveRequest
from services.router.session import Session
from services.router.tokens import Claims

LINK_WAIT_S: Final = 5.0
"""How long we try to reach the worker: a router that has just been started may not have dialled it yet."""

UNLISTED_WAIT_S: Final = 3.0
"""How long a worker may be missing in the registry before it counts as gone: it, or its store, may be coming
back."""

_VOCABULARY: Final = 1 << 32
"""Ids were checked by the router that admitted them, and by the worker."""


class Owner(Protocol):
    """Who has the requests: the router's loop."""

    policy: RouterPolicy
    live: dict[RequestId, LiveRequest]

    def session_with(self, ref: WorkerRef) -> Session | None:
        """The open session with that start of a worker."""

    def adopt(self, live: LiveRequest, ref: WorkerRef) -> None:
        """Takes a request in that runs on `ref`."""

    def hang_up(self, live: LiveRequest) -> None:
        """The client of an adopted request has gone."""

    def attachment_failed(self, request_id: RequestId) -> None:
        """Nothing came of it, and nothing changed."""

    def attachment_dropped(self, request_id: RequestId, session: Session) -> None:
        """The client went before the worker's answer came, which may have handed the request over."""


@dataclass(slots=True, eq=False)
class _Coming:
    """One that was asked for."""

    ref: WorkerRef
    next_index: int
    answer: asyncio.Future[LiveRequest]
    submit: decode_pb2.Submit | None = None
    tokens: list[int] = field(default_factory=list)


class Attachments:
    """Belongs to one event loop."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._coming: dict[RequestId, _Coming] = {}
        self._changed = asyncio.Event()

    async def attach(self, claims: Claims, next_index: int, turn: int = 0) -> LiveRequest:
        """The request, live here from now on; its first piece begins at `next_index`. `turn`: the caller's
        count.

        Raises Stale where it is gone, Cancelled where somebody ended it, InvalidField for an index that it
        has not come to, PeerLost where its worker does not answer now, or moves elsewhere just now: it may
        later.
        """
        request_id = claims.request_id
        ref = self._where(claims)
        session = await self._reach(ref)
        while (other := self._coming.get(request_id)) is not None or self._where(claims) != ref:
            if other is not None:  # its answer comes first, on the same session
                await asyncio.wait({other.answer})
            ref = self._where(claims)
            session = await self._reach(ref)
        coming = _Coming(ref, next_index, asyncio.get_running_loop().create_future())
        self._coming[request_id] = coming
        session.attach(
            decode_pb2.SessionAttach(
                request_id=request_id, tenant=claims.tenant, next_index=next_index, turn=turn
            )
        )
        return await self._answered(request_id, coming, session)

    def is_coming(self, request_id: RequestId) -> bool:
        """Whether a call waits for it."""
        return request_id in self._coming

    def answer(self, ref: WorkerRef, answer: decode_pb2.SessionResponse) -> None:
        """A worker's answer, or a part of it. What was not asked for, or is given up, is passed over."""
        if answer.HasField("refused"):
            failure = answer.refused.failure
            error = named_error(failure.kind, failure.message)
            self._fail(RequestId(answer.refused.request_id), ref, error)
            return
        is_first = answer.HasField("attached")
        request_id = RequestId(answer.attached.request_id if is_first else answer.piece.request_id)
        coming = self._coming.get(request_id)
        if coming is None or coming.ref != ref:
            return
        if is_first and answer.attached.num_output == coming.next_index:
            coming.submit = answer.attached
            coming.tokens = list(answer.attached.tokens)
        elif not is_first and answer.piece.offset == len(coming.tokens):
            coming.tokens.extend(answer.piece.tokens)
        if coming.submit is not None and len(coming.tokens) >= coming.submit.num_tokens:
            self._arrived(request_id, coming, coming.submit)

    def lost(self, ref: WorkerRef, cause: DiptychError) -> None:
        """The session with that worker is gone."""
        for request_id in [name for name, coming in self._coming.items() if coming.ref == ref]:
            problem = f"{ref} was lost while a call attached to its request: {cause}"
            self._fail(request_id, ref, PeerLost(problem))

    def look(self) -> None:
        """Workers came, went, or were reached."""
        self._changed.set()

    def assert_empty(self) -> None:
        """Raises Internal if a request is on its way."""
        if self._coming:
            raise Internal(f"left on their way here: {sorted(self._coming)}")

    def _where(self, claims: Claims) -> WorkerRef:
        """The worker of a request that is live here is known better than its token knows it."""
        request_id, policy = claims.request_id, self._owner.policy
        if request_id not in self._owner.live:
            return claims.ref
        if policy.is_cancelling(request_id):
            raise Cancelled(f"{request_id} was cancelled")
        ref = policy.worker_of(request_id)
        if ref is None:
            raise PeerLost(f"{request_id} has lost its decode worker and waits for another")
        return ref

    async def _reach(self, ref: WorkerRef) -> Session:
        began = time.monotonic()
        while (session := self._owner.session_with(ref)) is None:
            waited = time.monotonic() - began
            known = self._owner.policy.knows(ref)
            left = (LINK_WAIT_S if known else UNLISTED_WAIT_S) - waited
            if left <= 0 and not known:
                raise Stale(f"decode worker {ref}, which had the request, is gone: ask again")
            if left <= 0:
                raise PeerLost(f"decode worker {ref} was not reached within {LINK_WAIT_S:g} s")
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return session

    async def _answered(self, request_id: RequestId, coming: _Coming, session: Session) -> LiveRequest:
        try:
            return await coming.answer
        except DiptychError:
            self._owner.attachment_failed(request_id)
            raise
        except asyncio.CancelledError:
            if self._coming.get(request_id) is coming:
                del self._coming[request_id]
                self._owner.attachment_dropped(request_id, session)
            elif coming.answer.exception() is not None:
                self._owner.attachment_failed(request_id)
            else:
                self._owner.hang_up(coming.answer.result())
            raise

    def _arrived(self, request_id: RequestId, coming: _Coming, submit: decode_pb2.Submit) -> None:
        failpoint("router.attached")
        del self._coming[request_id]
        if coming.answer.cancelled():
            return
        try:
            live = _live_request(request_id, submit, coming.tokens)
            self._owner.adopt(live, coming.ref)
        except DiptychError as error:
            coming.answer.set_exception(error)
        else:
            coming.answer.set_result(live)

    def _fail(self, request_id: RequestId, ref: WorkerRef, error: DiptychError) -> None:
        coming = self._coming.get(request_id)
        if coming is not None and coming.ref == ref:
            del self._coming[request_id]
            if not coming.answer.cancelled():
                coming.answer.set_exception(error)


def _live_request(request_id: RequestId, submit: decode_pb2.Submit, tokens: list[int]) -> LiveRequest:
    """Raises InvalidField for parameters that are none."""
    num_prompt = len(tokens) - submit.num_output
    checked = CheckedRequest(
        tuple(tokens[:num_prompt]),
        params_from_proto(submit.params, _VOCABULARY),
        Tenant(submit.tenant),
        "",
        submit.priority,
        submit.cache_salt,
    )
    return LiveRequest(
        request_id,
        checked,
        time.monotonic(),
        output=tokens[num_prompt:],
        num_earlier_moves=max(0, submit.placement - 1),
    )
