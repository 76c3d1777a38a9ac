"""The gRPC face of a decode worker: sessions of routers, `Begin` and hand-offs of prefill workers,
inspection."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from diptych.domain.errors import DiptychError, LayoutMismatch, PeerLost, Stale, TransferFailed
from diptych.domain.fallbacks import fallback_named
from diptych.domain.ids import Epoch, RequestId, WorkerId
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.ports import Region
from diptych.rpc.failpoint import failpoint
from diptych.rpc.inspection import status_message
from diptych.rpc.kv_codec import piece_from_proto, region_from_proto
from diptych.rpc.params import params_to_proto
from diptych.v1 import decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from diptych.v1.kv_pb2 import KvRegion
from services.decode.account import tell_more
from services.decode.attempts import AttemptStream, check_open, key_of
from services.decode.messages import AttemptAlive, AttemptFailed, ChunkReady, ManifestReceived
from services.decode.sessions import RouterSession, check_hello
from services.decode.worker import DecodeWorker

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
SILENCE_S = 5.0
"""A router that says nothing for so long has stopped, though its stream may be open."""

MAX_OTHERS = 8
"""Channels beside the first over which a chunk may be announced."""

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Sessions of routers, `Begin` and hand-offs of prefill workers."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        hello = check_hello(await _first(request_iterator), self._worker.worker_id, self._worker.epoch)
        if not self._worker.is_lively:
            raise PeerLost("the engine of this worker does not go on")
        session = self._worker.open_session(hello.router_id, hello.router_epoch, hello.session)
        reader = asyncio.create_task(self._read_session(session, request_iterator), name="session reader")
        try:
            welcome = decode_pb2.SessionWelcome(
                worker_id=self._worker.worker_id, worker_epoch=self._worker.epoch
            )
            yield session.numbered(decode_pb2.SessionResponse(welcome=welcome))
            while (response := await session.next(HEARTBEAT_S, self._lively)) is not None:
                yield response
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            # Before anything is waited for: a peer that hangs up has this call cancelled at any moment.
            self._worker.close_session(session)
            await asyncio.wait({reader})

    def _lively(self) -> bool:
        return self._worker.is_lively

    async def Begin(self, request: decode_pb2.BeginRequest, context: Context) -> decode_pb2.BeginResponse:  # noqa: N802
        failpoint("decode.begin")
        if request.wire_version != WIRE_VERSION:
            raise LayoutMismatch(f"wire version {request.wire_version}, ours is {WIRE_VERSION}")
        if request.decode_epoch != self._worker.epoch:
            raise Stale(f"epoch {request.decode_epoch} is not this process")
        await self._worker.check_prefill(WorkerId(request.prefill_worker), Epoch(request.prefill_epoch))
        begun = await self._worker.begin(request)
        failpoint("decode.begun")
        return decode_pb2.BeginResponse(
            attempt=begun.attempt,
            tokens=begun.tokens,
            params=params_to_proto(begun.params) if begun.params else None,
            banned=begun.banned,
            num_held=begun.num_held,
            cache_root=begun.cache_root,
            timeout_s=begun.timeout_s,
        )

    async def Handoff(  # noqa: N802
        self, request_iterator: AsyncIterator[decode_pb2.HandoffRequest], context: Context
    ) -> AsyncIterator[decode_pb2.HandoffResponse]:
        opening = check_open(await _first(request_iterator), self._worker.epoch)
        failpoint("decode.handoff")
        sources = self._worker.sources_of(WorkerId(opening.prefill_worker), Epoch(opening.prefill_epoch))
        stream = self._worker.streams.open(key_of(opening), sources)
        reader = asyncio.create_task(self._read_handoff(stream, request_iterator), name="hand-off reader")
        try:
            while True:
                response = await stream.next()
                yield response
                if response.WhichOneof("body") != "released":
                    return
        finally:
            reader.cancel()
            self._worker.streams.close(stream)  # first, as above
            if not stream.ended:
                self._lost(stream, "PeerLost", "the hand-off's stream broke")
            await asyncio.wait({reader})

    async def _read_session(
        self, session: RouterSession, requests: AsyncIterator[decode_pb2.SessionRequest]
    ) -> None:
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    self._take(session, await anext(requests))
        except (StopAsyncIteration, TimeoutError, grpc.RpcError):
            pass
        finally:
            session.close()

    def _take(self, session: RouterSession, request: decode_pb2.SessionRequest) -> None:
        if not session.is_next(request.sequence):
            self._worker.deliveries.counters["message_repeated"] += 1
            return
        match request.WhichOneof("body"):
            case "submit":
                whole = session.assemble(request.submit)
            case "piece":
                whole = session.add_piece(request.piece)
            case "cancel":
                failpoint("decode.cancel")
                request_id = RequestId(request.cancel.request_id)
                dropped = session.drop_assembly(request_id)
                waited = self._worker.deliveries.forget_waiting(session, request_id)
                if waited or dropped is not None:
                    self._worker.abort_unsubmitted(session, request_id)
                else:
                    self._worker.deliveries.cancel(session, request_id)
                return
            case "attach":
                self._worker.deliveries.attach(session, request.attach)
                return
            case "acknowledge":
                self._worker.deliveries.acknowledge(session, RequestId(request.acknowledge.request_id))
                return
            case _:
                return
        if whole is not None:
            self._worker.submit(session, whole)

    async def _read_handoff(
        self, stream: AttemptStream, requests: AsyncIterator[decode_pb2.HandoffRequest]
    ) -> None:
        try:
            async for request in requests:
                self._take_handoff(stream, request)
        except DiptychError as error:
            self._lost(stream, type(error).__name__, str(error))
        except grpc.RpcError as error:
            self._lost(stream, "PeerLost", str(error))
        except Exception:
            log.exception("the hand-off of %s", stream.key)
            self._lost(stream, "Internal", "the decode worker could not read its hand-off's stream")
        else:
            if not stream.ended:
                self._lost(stream, "PeerLost", "the hand-off's stream ended early")

    def _take_handoff(self, stream: AttemptStream, request: decode_pb2.HandoffRequest) -> None:
        request_id, attempt = stream.key
        inbox = self._worker.inbox
        match request.WhichOneof("body"):
            case "chunk":
                failpoint("decode.chunk")
                chunk = request.chunk
                piece = piece_from_proto(chunk.piece)
                if (piece.region.kind, piece.region.address) not in stream.sources:
                    raise TransferFailed(
                        f"{piece.region.address} is not where this prefill worker is registered"
                    )
                inbox.chunks.append(
                    ChunkReady(
                        request_id, attempt, chunk.index, chunk.start, chunk.num_tokens,
                        piece, chunk.digest, _registered(chunk.others, stream),
                    )
                )  # fmt: skip
            case "manifest":
                failpoint("decode.manifest")
                manifest = request.manifest
                inbox.manifests.append(
                    ManifestReceived(
                        request_id, attempt, manifest.num_chunks, manifest.num_tokens, manifest.fingerprint,
                        manifest.first_token, manifest.prefill_s, manifest.num_cached_tokens,
                        manifest.num_borrowed_tokens,
                        {fallback_named(told.reason): told.count for told in manifest.fallbacks},
                        time.monotonic() - manifest.since_computed_s,
                    )
                )  # fmt: skip
            case "failed":
                failure = request.failed.failure
                self._lost(stream, failure.kind, failure.message)
            case _:
                inbox.alive.append(AttemptAlive(request_id, attempt))

    def _lost(self, stream: AttemptStream, kind: str, message: str) -> None:
        self._worker.inbox.failures.append(AttemptFailed(*stream.key, kind, message))


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Inspection."""

    def __init__(self, worker: DecodeWorker, role: worker_pb2.Role.ValueType) -> None:
        self._worker = worker
        self._role = role

    async def Inspect(self, request: worker_pb2.InspectRequest, context: Context) -> worker_pb2.WorkerStatus:  # noqa: N802
        worker = self._worker
        if request.fresh:
            await worker.looks.take()
        status = status_message(
            worker.worker_id, self._role, worker.epoch, worker.ready, worker.load, os.getpid()
        )
        status.num_prefill_workers = worker.num_prefill_workers
        tell_more(status, worker)
        for reason, count in sorted(worker.deliveries.counters.items()):
            status.counters.add(reason=reason, count=count)
        return status

    async def DropCache(  # noqa: N802
        self, request: worker_pb2.DropCacheRequest, context: Context
    ) -> worker_pb2.DropCacheResponse:
        num_dropped = self._worker.load.blocks_cached
        self._worker.inbox.drop_cache.append(True)
        return worker_pb2.DropCacheResponse(num_dropped=num_dropped)


def _registered(others: Iterable[KvRegion], stream: AttemptStream) -> list[Region]:
    """Those of a chunk's regions that are where its owner is registered; the rest is nobody's."""
    regions = (region_from_proto(other) for other in itertools.islice(others, MAX_OTHERS))
    return [region for region in regions if (region.kind, region.address) in stream.sources]


async def _first(requests: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        raise PeerLost("the stream ended before its first message") from None
