"""A router of real gRPC whose answers a test writes down beforehand; for what stands in front of routers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from types import TracebackType
from typing import Any, Self

import grpc

from diptych.domain.errors import DiptychError
from diptych.rpc.options import serving_options
from diptych.rpc.status import to_status
from diptych.v1 import common_pb2, router_pb2, worker_pb2
from diptych.v1.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server

HOLD = "hold"
"""In a script: nothing comes until the caller cancels but signs of life, where those are wanted."""
STOP = "stop"
"""In a script: say nothing until the caller cancels, as a process that was stopped."""
LOSE = "lose"
"""In a script: end the call as a router does that dies: without a word."""

Step = router_pb2.GenerateResponse | DiptychError | str

DEADLINE_S = 20.0


def pieces(*texts: str, first: int = 0) -> list[Step]:
    """One message for each text, with one token each."""
    return [
        router_pb2.GenerateResponse(request_id="r-1", index=first + i, tokens=[100 + first + i], text=text)
        for i, text in enumerate(texts)
    ]


def last(reason: str = "LENGTH", index: int = 0, **trail: Any) -> router_pb2.GenerateResponse:
    """The last message of a stream."""
    value = common_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    finish = common_pb2.Finish(reason=value, trail=common_pb2.Trail(**trail))
    return router_pb2.GenerateResponse(request_id="r-1", index=index, finish=finish)


def failed(kind: str, message: str) -> router_pb2.GenerateResponse:
    """The last message of a stream that failed."""
    failure = common_pb2.Failure(kind=kind, message=message)
    finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_ERROR, failure=failure)
    return router_pb2.GenerateResponse(request_id="r-1", finish=finish)


def worker(worker_id: str, role: worker_pb2.Role.ValueType, **load: Any) -> worker_pb2.WorkerStatus:
    """A worker as a router tells of it."""
    return worker_pb2.WorkerStatus(
        worker_id=worker_id,
        role=role,
        epoch=7,
        address="127.0.0.1:1",
        model="toy",
        pid=4242,
        load=worker_pb2.Load(**load),
    )


class FakeRouter(RouterServicer):
    """Serves while entered, on a free port unless one is given. One of `scripts` for each Generate and
    Attach."""

    def __init__(self, *scripts: Sequence[Step], port: int = 0) -> None:
        self.scripts = list(scripts)
        self.requests: list[router_pb2.GenerateRequest] = []
        self.attaches: list[router_pb2.AttachRequest] = []
        self.early_token = b""
        """Told with the initial metadata."""
        self.status = router_pb2.StatusResponse(router_id="router-0", store_available=True)
        self.models = [router_pb2.Model(name="toy", max_context=4096, fingerprint="f0")]
        self.live: set[str] = set()
        self.hold_s = DEADLINE_S
        """How long `HOLD` lasts at most, and what comes then."""
        self.after_hold: Sequence[Step] = ()
        self.on_attach: Callable[[], None] = lambda: None
        """Called at the begin of each Attach."""
        self.cancelled = threading.Event()
        """Set once a caller has given up a stream before its end."""
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=serving_options())
        add_RouterServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"

    def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: Any
    ) -> Iterator[router_pb2.GenerateResponse]:
        self.requests.append(request)
        return self._play(context, request.heartbeat_s)

    def Attach(  # noqa: N802
        self, request: router_pb2.AttachRequest, context: Any
    ) -> Iterator[router_pb2.GenerateResponse]:
        self.on_attach()
        self.attaches.append(request)
        return self._play(context, request.heartbeat_s)

    def _play(self, context: Any, heartbeat_s: float) -> Iterator[router_pb2.GenerateResponse]:
        # From the start: a call that is cancelled while we have the floor never resumes this generator.
        script, ended, said_all = self.scripts.pop(0), threading.Event(), []

        def on_end() -> None:
            ended.set()
            if not said_all:
                self.cancelled.set()

        context.add_callback(on_end)
        if self.early_token:
            context.send_initial_metadata((("diptych-resume-token-bin", self.early_token),))
        for step in script:
            if isinstance(step, DiptychError):
                context.abort_with_status(to_status(step))
            elif step == LOSE:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            elif step == HOLD and heartbeat_s:
                yield from self._hold(ended, heartbeat_s)
                if ended.is_set():
                    return
            elif isinstance(step, str):
                assert ended.wait(DEADLINE_S), "nobody cancelled"
                return
            else:
                yield step
        said_all.append(True)

    def _hold(self, ended: threading.Event, heartbeat_s: float) -> Iterator[router_pb2.GenerateResponse]:
        give_up = time.monotonic() + self.hold_s
        while not ended.wait(heartbeat_s):
            if time.monotonic() > give_up:
                assert self.after_hold, "nobody cancelled"
                yield from (step for step in self.after_hold if isinstance(step, router_pb2.GenerateResponse))
                return
            yield router_pb2.GenerateResponse(request_id="r-1")

    def Cancel(self, request: router_pb2.CancelRequest, context: Any) -> router_pb2.CancelResponse:  # noqa: N802
        return router_pb2.CancelResponse(found=request.request_id in self.live)

    def Status(self, request: router_pb2.StatusRequest, context: Any) -> router_pb2.StatusResponse:  # noqa: N802
        return self.status

    def ListModels(  # noqa: N802
        self, request: router_pb2.ListModelsRequest, context: Any
    ) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse(models=self.models)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stop(0).wait(DEADLINE_S)
