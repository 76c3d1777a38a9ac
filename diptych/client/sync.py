"""The blocking client. Safe to share between threads; one `Generation` belongs to one thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

from diptych.client.course import HEARTBEAT_S, Course
from diptych.client.line import Line, cancel_all
from diptych.client.requests import Message, Options, build_request
from diptych.client.routers import Routers
from diptych.client.values import ModelInfo, Piece, RouterStatus, read_models, read_status
from diptych.domain.errors import DiptychError
from diptych.rpc.tls import TlsSettings
from diptych.v1 import router_pb2


class Generation:
    """The pieces of one answer, as they come. Closing it, or leaving its `with`, cancels the rest.

    When its router dies or stops after it has taken the request, the answer goes on at another, or at the
    same one started again: no token is lost and none comes twice.
    """

    def __init__(
        self, routers: Routers, request: router_pb2.GenerateRequest, timeout_s: float, reattach_s: float
    ) -> None:
        self._routers = routers
        self._request = request
        self._deadline = time.monotonic() + timeout_s
        self._course = Course(request.tenant, len(routers.addresses), reattach_s)
        self._closing = threading.Event()
        self._ended = False
        self._lines = [Line(*routers.generate(request, timeout_s))]
        """The call that is listened to is the last; those before it fell silent."""
        # The threads that read know nothing of us: who forgets an answer has closed it.
        weakref.finalize(self, cancel_all, self._lines).atexit = False

    @property
    def request_id(self) -> str:
        """The router's name for the request; empty until the first piece."""
        return self._course.request_id

    @property
    def num_reattached(self) -> int:
        """How often the stream has gone on at another router, or at another start of one."""
        return self._course.num_reattached

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        try:
            while not self._ended:
                message = self._next_message()
                piece = self._course.take(message)
                if message.request_id:
                    self._leave_earlier_calls()
                if piece is not None:
                    self._ended = piece.finish is not None
                    return piece
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def _next_message(self) -> router_pb2.GenerateResponse:
        while True:
            try:
                return self._lines[-1].next(self._course.patience)
            except DiptychError as error:
                self._call_again(error)

    def _call_again(self, error: DiptychError) -> None:
        """After the call has ended, or fallen silent, with `error`; raises what ends the stream."""
        if self._ended or self._routers.closed:
            raise error
        line = self._lines[-1]
        self._course.learn_from(line.metadata())
        now = time.monotonic()
        again = self._course.after_loss(error, now)
        self._routers.addresses.leave(line.address)
        if self._closing.wait(again.pause_s):
            raise error
        left_s = max(0.0, self._deadline - now)
        if again.attach:
            address, call = self._routers.attach(self._course.attach_request(), left_s)
        else:
            address, call = self._routers.generate(self._request, left_s)
        self._lines.append(Line(address, call))
        if self._closing.is_set():  # closed by another thread meanwhile, which saw the calls before
            cancel_all(self._lines)

    def _leave_earlier_calls(self) -> None:
        if len(self._lines) > 1:
            cancel_all(self._lines[:-1])
            del self._lines[:-1]

    def close(self) -> None:
        """Cancels the request everywhere unless it has ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._closing.set()
            cancel_all(self._lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Speaks to one router at a time. Connects at the first call, and again by itself after a loss."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tenant: str = "",
        timeout_s: float = 600.0,
        reattach_s: float = 20.0,
        tls: TlsSettings | None = None,
    ) -> None:
        """`address` is `host:port`, or several in a list or separated by commas: routers of one system.

        `timeout_s` bounds a whole generation; other calls have 10 s at most. `reattach_s` bounds how long a
        generation may be without a router, from the moment that the loss is known; 0: it fails with the
        router that began it. Raises InvalidField where the certificates cannot be used.
        """
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._reattach_s = reattach_s
        self._call_timeout_s = min(timeout_s, 10.0)
        self._routers = Routers(address, tls)

    @property
    def address(self) -> str:
        """The router that is spoken to now."""
        return self._routers.addresses.current

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        **options: Unpack[Options],
    ) -> Generation:
        """Starts a request; its pieces are read from what is returned, and errors are raised there.

        Exactly one input: a `prompt` as it is, chat `messages` for the model's template, or `token_ids`. An
        empty `model` is the one that is served. At most 256 tokens unless `max_tokens` says otherwise, greedy
        unless `temperature` does. Raises InvalidField here for arguments that can't be sent.
        """
        request = build_request(prompt, messages, token_ids, options)
        request.model, request.tenant = model, self._tenant
        request.heartbeat_s = HEARTBEAT_S
        return Generation(self._routers, request, self._timeout_s, self._reattach_s)

    def cancel(self, request_id: str) -> bool:
        """Ends a request of this tenant everywhere. False: no such live request."""
        request = router_pb2.CancelRequest(request_id=request_id, tenant=self._tenant)
        timeout_s = self._call_timeout_s
        return self._routers.ask_all(lambda router: router.Cancel(request, timeout=timeout_s).found)

    def status(self) -> RouterStatus:
        """The router, its workers and their load."""
        request, timeout_s = router_pb2.StatusRequest(), self._call_timeout_s
        return read_status(self._routers.ask(lambda router: router.Status(request, timeout=timeout_s)))

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        request, timeout_s = router_pb2.ListModelsRequest(), self._call_timeout_s
        return read_models(self._routers.ask(lambda router: router.ListModels(request, timeout=timeout_s)))

    def close(self) -> None:
        """Ends every call that is under way. Idempotent."""
        self._routers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
