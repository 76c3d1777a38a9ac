"""One attempt's stream to its decode worker, from `Begin` to its end.

    Begin ─▶ open ─▶ chunk … chunk ─▶ manifest ─▶ (released …) ─▶ done
                        │ failed(reason)                │ stop(reason), or the stream breaks
                        ▼                               ▼
                   the decode worker decides       the engine forgets the attempt

A sign of life goes out in each pause, but only while our own engine gives signs of life: a stopped engine
must look stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diptych.domain.engine_report import FailureInfo
from diptych.domain.errors import DiptychError
from diptych.domain.ids import Attempt, Epoch, RequestId, WorkerId
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.records import PrefillJob
from diptych.rpc.kv_codec import piece_to_proto, region_to_proto
from diptych.rpc.status import domain_errors
from diptych.v1 import common_pb2, decode_pb2
from services.prefill.messages import AttemptKey, ChunkAnnounced, ManifestReady

if TYPE_CHECKING:  # the name is in the stubs only
    from diptych.v1.decode_pb2_grpc import DecodeAsyncStub

BEGIN_TIMEOUT_S = 2.0
"""Shorter than a claimed job may lie before it goes to another worker."""
HEARTBEAT_S = 0.25
FAREWELL_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are, to decode workers."""

    worker_id: WorkerId
    epoch: Epoch
    fingerprint: str


async def ask_begin(stub: DecodeAsyncStub, job: PrefillJob, us: Identity) -> decode_pb2.BeginResponse:
    """Asks the decode worker for a job's tokens. Raises its refusal, or PeerLost."""
    request = decode_pb2.BeginRequest(
        wire_version=WIRE_VERSION,
        request_id=job.request_id,
        decode_epoch=job.decode_epoch,
        prefill_worker=us.worker_id,
        prefill_epoch=us.epoch,
        fingerprint=us.fingerprint,
        num_attempts=job.num_attempts,
    )
    with domain_errors():
        return await stub.Begin(request, timeout=BEGIN_TIMEOUT_S)


class HandoffStream:
    """Carries one attempt's messages. `run` ends with the stream; `released` and `stopped` are told
    meanwhile."""

    def __init__(
        self,
        key: AttemptKey,
        job: PrefillJob,
        us: Identity,
        is_lively: Callable[[], bool],
        released: Callable[[int], None],
    ) -> None:
        self.key = key
        self._job = job
        self._us = us
        self._is_lively = is_lively
        self._released = released
        self.opened_at = time.monotonic()
        self._failed = asyncio.Event()
        self._queue: asyncio.Queue[decode_pb2.HandoffRequest | None] = asyncio.Queue()

    @property
    def decode_worker(self) -> WorkerId:
        return self._job.decode_worker

    def announce(self, chunk: ChunkAnnounced) -> None:
        self._put(
            decode_pb2.HandoffRequest(
                chunk=decode_pb2.ChunkReady(
                    index=chunk.index,
                    start=chunk.start,
                    num_tokens=chunk.num_tokens,
                    piece=piece_to_proto(chunk.piece),
                    digest=chunk.digest,
                    codec="none",
                    others=map(region_to_proto, chunk.others),
                )
            )
        )

    def conclude(self, manifest: ManifestReady) -> None:
        self._put(
            decode_pb2.HandoffRequest(
                manifest=decode_pb2.Manifest(
                    num_chunks=manifest.num_chunks,
                    num_tokens=manifest.num_tokens,
                    fingerprint=manifest.fingerprint,
                    first_token=manifest.first_token,
                    prefill_s=manifest.prefill_s,
                    num_cached_tokens=manifest.num_cached_tokens,
                    num_borrowed_tokens=manifest.num_borrowed_tokens,
                    fallbacks=[
                        common_pb2.Fallback(reason=reason, count=count)
                        for reason, count in manifest.fallbacks.items()
                    ],
                    since_computed_s=max(0.0, time.monotonic() - manifest.computed_at),
                )
            )
        )

    def over(self, failure: FailureInfo | None) -> None:
        """The engine has ended the attempt. Without a failure the decode worker knows already."""
        if failure is not None:
            told = common_pb2.Failure(kind=failure.kind, message=failure.message, retry=failure.retry)
            self._put(decode_pb2.HandoffRequest(failed=decode_pb2.PrefillFailed(failure=told)))
            self._failed.set()
        self._queue.put_nowait(None)

    async def run(self, stub: DecodeAsyncStub) -> bool:
        """Carries messages until the stream ends. True: the decode worker has everything.

        After a failure of ours the decode worker has `FAREWELL_S` to end the stream; it may be stopped.
        """
        call = stub.Handoff(self._requests())
        reading = asyncio.create_task(self._read(call), name="hand-off reader")
        failing = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({reading, failing}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading}, timeout=FAREWELL_S)
            return reading.done() and reading.result()
        finally:
            failing.cancel()
            reading.cancel()
            call.cancel()
            await asyncio.wait({reading, failing})

    async def _read(self, call: AsyncIterable[decode_pb2.HandoffResponse]) -> bool:
        try:
            with domain_errors():
                async for response in call:
                    match response.WhichOneof("body"):
                        case "released":
                            self._released(response.released.index)
                        case body:
                            return body == "done"
        except DiptychError:
            pass  # the decode worker is gone, or wants no more
        return False

    async def _requests(self) -> AsyncIterator[decode_pb2.HandoffRequest]:
        us, key = self._us, self.key
        opening = decode_pb2.HandoffOpen(
            request_id=key.request_id,
            attempt=key.attempt,
            decode_epoch=self._job.decode_epoch,
            prefill_worker=us.worker_id,
            prefill_epoch=us.epoch,
        )
        yield decode_pb2.HandoffRequest(open=opening)
        while (request := await self._next()) is not None:
            yield request

    async def _next(self) -> decode_pb2.HandoffRequest | None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    return await self._queue.get()
            except TimeoutError:
                if self._is_lively():
                    return decode_pb2.HandoffRequest(heartbeat=decode_pb2.Heartbeat())

    def _put(self, request: decode_pb2.HandoffRequest) -> None:
        self._queue.put_nowait(request)


def key_of(job: PrefillJob, begun: decode_pb2.BeginResponse) -> AttemptKey:
    """The name of the attempt that `begun` minted."""
    return AttemptKey(RequestId(job.request_id), Attempt(begun.attempt), job.decode_epoch)
