"""The blocking client. Safe to share between threads; one `Generation` belongs to one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from diptych.client.requests import Message, Options, build_request
from diptych.client.values import ModelInfo, Piece, RouterStatus, read_models, read_piece, read_status
from diptych.domain.errors import PeerLost
from diptych.rpc.options import dialling_options
from diptych.rpc.status import domain_errors
from diptych.rpc.tls import TlsSettings
from diptych.v1 import router_pb2
from diptych.v1.router_pb2_grpc import RouterStub


class Generation:
    """The pieces of one answer, as they come. Closing it, or leaving its `with`, cancels the rest."""

    def __init__(self, call: grpc.CallIterator[router_pb2.GenerateResponse]) -> None:
        self._call = call
        self._messages = iter(call)
        self._ended = False
        self.request_id = ""
        """The router's name for the request; empty until the first piece."""

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self._ended:
            raise StopIteration
        try:
            with domain_errors():
                message = next(self._messages, None)
            if message is None:
                raise PeerLost("the router ended the stream before its last message")
            piece = read_piece(message)
        except BaseException:
            self.close()
            raise
        self.request_id = piece.request_id
        self._ended = piece.finish is not None
        return piece

    def close(self) -> None:
        """Cancels the request everywhere unless it has ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._call.cancel()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Speaks to one router. Connects at the first call, and again by itself after a loss."""

    def __init__(
        self, address: str, *, tenant: str = "", timeout_s: float = 600.0, tls: TlsSettings | None = None
    ) -> None:
        """`address` is `host:port`. `timeout_s` bounds a whole generation; other calls have 10 s at most.

        Raises InvalidField where the certificates cannot be used.
        """
        self.address = address
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._call_timeout_s = min(timeout_s, 10.0)
        self._channel = _open_channel(address, tls)
        self._router = RouterStub(self._channel)

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
        return Generation(self._router.Generate(request, timeout=self._timeout_s))

    def cancel(self, request_id: str) -> bool:
        """Ends a request of this tenant everywhere. False: no such live request."""
        request = router_pb2.CancelRequest(request_id=request_id, tenant=self._tenant)
        with domain_errors():
            return self._router.Cancel(request, timeout=self._call_timeout_s).found

    def status(self) -> RouterStatus:
        """The router, its workers and their load."""
        with domain_errors():
            return read_status(self._router.Status(router_pb2.StatusRequest(), timeout=self._call_timeout_s))

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        with domain_errors():
            answer = self._router.ListModels(router_pb2.ListModelsRequest(), timeout=self._call_timeout_s)
        return read_models(answer)

    def close(self) -> None:
        """Ends every call that is under way. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_channel(address: str, tls: TlsSettings | None) -> grpc.Channel:
    options = dialling_options()
    if tls is None:
        return grpc.insecure_channel(address, options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(address, tls.channel_credentials(), options)
