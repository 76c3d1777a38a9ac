"""A router of real gRPC in this process, in front of decode workers that a test lists. No store, no other
process.

Leaving the rig asserts that nothing is left: no live request, no session, no task.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import Any, Self

from opentelemetry.sdk.metrics.export import MetricReader

from diptych.client.aio import AsyncClient, AsyncGeneration
from diptych.client.values import Piece, RouterStatus
from diptych.domain.ids import WorkerId
from diptych.domain.records import WorkerRecord
from diptych.rpc.dial import Dialer
from diptych.rpc.server import RpcServer, serve
from diptych.store.membership import new_epoch
from diptych.telemetry.recorder import Recorder
from diptych.v1.router_pb2_grpc import add_RouterServicer_to_server
from services.router.assemble import assemble
from services.router.config import RouterSettings
from services.router.decisions import WorkerRef
from services.router.loop import RouterLoop
from services.router.model import ServedModel, load_model
from services.router.tokens import ResumeTokens
from tests.support.fake_decode import DEADLINE_S, FakeDecode, until

MODEL: ServedModel = load_model("toy")


def settings(**changes: Any) -> RouterSettings:
    """A router's settings, quick to notice and slow to give up."""
    quick: dict[str, Any] = {
        "redis_url": "unix:///nowhere",
        "model": "toy",
        "session_heartbeat_s": 0.05,
        "session_silent_s": 1.0,
        "max_wait_s": DEADLINE_S,
        "cancel_wait_s": DEADLINE_S,
        "moves_per_s": 1000.0,
    }
    return RouterSettings(**(quick | changes))


class RouterRig:
    """`workers` are in the registry from the start; `peers` may be changed at any time."""

    def __init__(self, *workers: FakeDecode, **changes: Any) -> None:
        self.settings = settings(**changes)
        self.peers: list[WorkerRecord] = [worker.record for worker in workers]
        self.store_available = True
        self.readers: list[MetricReader] = []
        self.tokens = ResumeTokens()
        self._dialer = Dialer()
        self.loop: RouterLoop
        self.server: RpcServer
        self.client: AsyncClient

    async def generate(self, prompt: str, max_tokens: int = 8, **options: Any) -> list[Piece]:
        """Runs one request to its end."""
        async with asyncio.timeout(DEADLINE_S), self.stream(prompt, max_tokens, **options) as generation:
            return [piece async for piece in generation]

    def stream(self, prompt: str, max_tokens: int = 8, **options: Any) -> AsyncGeneration:
        return self.client.generate(prompt, max_tokens=max_tokens, **options)

    async def status(self) -> RouterStatus:
        return await self.client.status()

    def list(self, *workers: FakeDecode) -> None:
        """From now on the registry knows these."""
        self.peers = [worker.record for worker in workers]

    async def linked(self) -> None:
        """Waits until exactly those that are listed may be given requests."""
        listed = {(peer.worker_id, peer.epoch) for peer in self.peers}
        await until(
            lambda: {(ref.worker_id, ref.epoch) for ref in self.loop.policy.usable} == listed, "sessions"
        )

    async def at_rest(self) -> None:
        """Waits until no request is live."""
        await until(lambda: not self.loop.live, "no live requests")

    async def __aenter__(self) -> Self:
        self.loop, servicer = assemble(
            self.settings,
            MODEL,
            WorkerRef(WorkerId("router-0"), new_epoch()),
            self._dialer,
            lambda: tuple(self.peers),
            lambda: self.store_available,
            Recorder("router", "router-0", self.readers),
            self.tokens,
        )
        registration = partial(add_RouterServicer_to_server, servicer)
        self.server = await serve([registration], address="127.0.0.1:0")
        self.client = AsyncClient(self.server.address)
        self._running = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.close()
        await self.server.drain(0)
        drained = await self.loop.drain(DEADLINE_S if error is None else 0.0)
        running_failed = self._running.done()
        self._running.cancel()
        await asyncio.wait({self._running})
        await self.loop.close()
        await self._dialer.close()
        if error is None:
            assert not running_failed, self._running.exception()
            assert drained
            self.loop.assert_empty()


def tokens_of(pieces: list[Piece]) -> list[int]:
    """All tokens of a stream. Fails unless indexes are contiguous and exactly the last piece is the end."""
    tokens: list[int] = []
    for piece in pieces:
        assert piece.index == len(tokens), f"index {piece.index} where {len(tokens)} was next"
        tokens += piece.tokens
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return tokens


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)
