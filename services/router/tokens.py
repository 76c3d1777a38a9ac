"""Resume tokens: what a client shows to any router to go on with a stream whose router is gone.

    token = signature (32 bytes) + payload      signature = HMAC-SHA256(key, purpose + payload)

The payload says which request of which tenant, on which start of which decode worker, and until when. It is
not secret. Whoever can sign can take over any request, so the key never leaves the routers and their store.

A router signs with one key and believes several: the one that it was given or drew itself, and each that the
routers of its shard have agreed on since.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import msgspec

from diptych.domain.errors import InvalidField, Stale, StoreUnavailable
from diptych.domain.ids import Epoch, RequestId, Tenant, WorkerId
from diptych.store.secret import SharedSecret
from services.router.decisions import WorkerRef

log = logging.getLogger(__name__)

TOKEN_LIFE_S: Final = 24 * 3600
"""Longer than a stream lasts; each router that goes on with one mints another."""

MAX_TOKEN_BYTES: Final = 4096
MAX_KEYS: Final = 4
RETRY_S: Final = 1.0

_SIGNATURE_BYTES: Final = 32
_PURPOSE: Final = b"diptych resume token 1\0"
_Payload = tuple[str, str, str, int, int]


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says: a request, whose it is, and where it runs."""

    request_id: RequestId
    tenant: Tenant
    ref: WorkerRef


class ResumeTokens:
    """Mints and reads. `secret`: the routers' own; empty: one is drawn, and `agree` makes it the shard's."""

    def __init__(self, secret: str = "", clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keys = [secret.encode() or secrets.token_bytes(32)]

    def mint(self, claims: Claims) -> bytes:
        """A token that is good for `TOKEN_LIFE_S`."""
        ref, until = claims.ref, int(self._clock()) + TOKEN_LIFE_S
        payload = msgspec.msgpack.encode((claims.request_id, claims.tenant, ref.worker_id, ref.epoch, until))
        return _sign(self._keys[0], payload) + payload

    def read(self, token: bytes, tenant: str) -> Claims:
        """What a token of this tenant says.

        Raises InvalidField where it is none of ours or another tenant's, Stale where its time is over.
        """
        if len(token) > MAX_TOKEN_BYTES:
            raise InvalidField("resume_token", f"must have at most {MAX_TOKEN_BYTES} bytes")
        signature, payload = token[:_SIGNATURE_BYTES], token[_SIGNATURE_BYTES:]
        # Each key is tried, so that the time it takes tells nothing of which.
        known = [hmac.compare_digest(signature, _sign(key, payload)) for key in self._keys]
        if not any(known):
            raise InvalidField(
                "resume_token", "was not given out by this router or one that shares its secret"
            )
        try:
            request_id, of_tenant, worker_id, epoch, until = msgspec.msgpack.decode(payload, type=_Payload)
        except msgspec.DecodeError:
            raise InvalidField("resume_token", "is of another version") from None
        if of_tenant != tenant:
            raise InvalidField("resume_token", "belongs to another tenant")
        if self._clock() > until:
            raise Stale("the resume token has expired: ask again")
        return Claims(RequestId(request_id), Tenant(of_tenant), WorkerRef(WorkerId(worker_id), Epoch(epoch)))

    async def agree(self, store: SharedSecret) -> None:
        """Signs with the shard's key from now on; ours becomes it where there is none.

        Raises StoreUnavailable, and goes on with what it had.
        """
        found = await store.agree(self._keys[0])
        self._keys = [found, *(key for key in self._keys if key != found)][:MAX_KEYS]


class KeyAgreement:
    """Entered: a router's tokens are agreed with the shard's, and agreed again whenever the store forgot."""

    def __init__(self, tokens: ResumeTokens, store: SharedSecret) -> None:
        self._tokens = tokens
        self._store = store
        self._due = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def again(self) -> None:
        """The store has lost its memory."""
        self._due.set()

    async def __aenter__(self) -> Self:
        await self._attempt()
        self._running = asyncio.create_task(self._run(), name="key agreement")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            if not await self._attempt():
                await asyncio.sleep(RETRY_S)

    async def _attempt(self) -> bool:
        """Whether it is agreed. If not, it is due again."""
        self._due.clear()
        try:
            await self._tokens.agree(self._store)
        except StoreUnavailable as error:
            log.warning("no key for resume tokens is agreed on; on with our own: %s", error)
            self._due.set()
            return False
        return True


def _sign(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + payload, hashlib.sha256)
