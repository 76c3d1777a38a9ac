"""The domain's errors as gRPC status with `google.rpc` details, and back. Nothing else translates.

Each error travels as a code that any client understands, plus details: `ErrorInfo` (domain `diptych`, reason
= the class name) always, `BadRequest` with the field for `InvalidField`, `RetryInfo` for `Overloaded` and
`Draining`. The reason is what brings back the same class on our own side of the wire; a status without it,
from gRPC itself or from something in between, is read by its code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode
from grpc_status import rpc_status

from diptych.domain import errors
from diptych.domain.errors import DiptychError

DOMAIN: Final = "diptych"

MAX_TEXT_BYTES: Final = 1024
"""Longest message, field or problem that is sent. Trailing metadata over 8 KiB would lose the whole status,
and what is not ASCII travels there at three bytes for one, the message twice."""

CODES: Final[dict[type[DiptychError], StatusCode]] = {
    DiptychError: StatusCode.UNKNOWN,
    errors.CallerError: StatusCode.INVALID_ARGUMENT,
    errors.InvalidField: StatusCode.INVALID_ARGUMENT,
    errors.UnknownModel: StatusCode.NOT_FOUND,
    errors.TooLarge: StatusCode.INVALID_ARGUMENT,
    errors.Unsupported: StatusCode.UNIMPLEMENTED,
    errors.PeerError: StatusCode.UNKNOWN,
    errors.Stale: StatusCode.FAILED_PRECONDITION,
    errors.PeerLost: StatusCode.UNAVAILABLE,
    errors.LayoutMismatch: StatusCode.FAILED_PRECONDITION,
    errors.DigestMismatch: StatusCode.DATA_LOSS,
    errors.TransferFailed: StatusCode.ABORTED,
    errors.StoreUnavailable: StatusCode.UNAVAILABLE,
    errors.OurError: StatusCode.INTERNAL,
    errors.Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: StatusCode.CANCELLED,
    errors.Draining: StatusCode.UNAVAILABLE,
    errors.Internal: StatusCode.INTERNAL,
}

_BARE_CODES: Final[dict[StatusCode, type[DiptychError]]] = {
    StatusCode.INVALID_ARGUMENT: errors.CallerError,
    StatusCode.NOT_FOUND: errors.CallerError,
    StatusCode.PERMISSION_DENIED: errors.CallerError,
    StatusCode.UNAUTHENTICATED: errors.CallerError,
    StatusCode.OUT_OF_RANGE: errors.CallerError,
    StatusCode.UNIMPLEMENTED: errors.Unsupported,
    # gRPC's own word for a message over the size limit; our full queues say `Overloaded` in their details.
    StatusCode.RESOURCE_EXHAUSTED: errors.TooLarge,
    StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    StatusCode.UNAVAILABLE: errors.PeerLost,
    # Who cancels a call himself sees `asyncio.CancelledError`; this is a server that was stopped under it.
    StatusCode.CANCELLED: errors.PeerLost,
    StatusCode.INTERNAL: errors.PeerLost,
}
"""What a status means that carries no details of ours."""


_NOT_CONNECTED: Final = ("failed to connect", "errors resolving", "DNS resolution failed")


def to_status(error: DiptychError) -> grpc.Status:
    """The status that tells `error` to any client."""
    text = _bounded(str(error)) or type(error).__name__
    status = Status(code=_code(type(error)).value[0], message=text)
    _attach(status, ErrorInfo(reason=type(error).__name__, domain=DOMAIN))
    if isinstance(error, errors.InvalidField):
        violation = BadRequest.FieldViolation(
            field=_bounded(error.field), description=_bounded(error.problem)
        )
        _attach(status, BadRequest(field_violations=[violation]))
    if isinstance(error, errors.Overloaded | errors.Draining):
        # Draining: at once, elsewhere.
        delay_s = error.retry_after_s if isinstance(error, errors.Overloaded) else 0.0
        info = RetryInfo()
        info.retry_delay.FromTimedelta(timedelta(seconds=delay_s))
        _attach(status, info)
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> DiptychError:
    """The error that the other side raised, or what the bare code means where gRPC itself failed the call."""
    status = _rich_status(error)
    info, text = ErrorInfo(), error.details() or ""
    if status is None or not _detail(status, info) or info.domain != DOMAIN:
        code = error.code()
        return _BARE_CODES.get(code, errors.PeerError)(f"{text} ({code.name})")
    return _rebuild(_CLASSES.get(info.reason), status, text)


def says_why(error: grpc.RpcError) -> bool:
    """Whether the other side raised it; else gRPC itself failed the call, or something in between did."""
    status, info = _rich_status(error), ErrorInfo()
    return status is not None and _detail(status, info) and info.domain == DOMAIN


def never_connected(error: grpc.RpcError) -> bool:
    """Whether the call failed because nobody could be reached: nobody has heard of it then. gRPC says so in
    words only; should they change, this is False, and callers try for longer than they need to."""
    return error.code() is StatusCode.UNAVAILABLE and (error.details() or "").startswith(_NOT_CONNECTED)


@contextmanager
def domain_errors() -> Iterator[None]:
    """Around calls to a peer: whatever gRPC raises comes out as the domain's error."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _code(kind: type[DiptychError]) -> StatusCode:
    return next(CODES[ancestor] for ancestor in kind.__mro__ if ancestor in CODES)


def _attach(status: Status, detail: ErrorInfo | BadRequest | RetryInfo) -> None:
    packed = Any()
    packed.Pack(detail)
    status.details.append(packed)


def _detail(status: Status, into: ErrorInfo | BadRequest | RetryInfo) -> bool:
    """Fill `into` with the first detail of its type; whether there was one."""
    return any(packed.Unpack(into) for packed in status.details)


def _rich_status(error: grpc.RpcError) -> Status | None:
    try:
        # Both kinds of RpcError that a call raises are calls; the type says so for neither.
        status: Status | None = rpc_status.from_call(error)  # type: ignore[arg-type]
    except (DecodeError, ValueError):
        # Bytes that are no status, or that contradict the code: as if there were none.
        return None
    return status


def _rebuild(kind: type[DiptychError] | None, status: Status, text: str) -> DiptychError:
    if kind is errors.InvalidField:
        bad = BadRequest()
        if _detail(status, bad) and bad.field_violations:
            return errors.InvalidField(bad.field_violations[0].field, bad.field_violations[0].description)
        return errors.CallerError(text)
    if kind is errors.Overloaded:
        retry = RetryInfo()
        if _detail(status, retry):
            return errors.Overloaded(text, retry_after_s=retry.retry_delay.ToTimedelta().total_seconds())
        return errors.Overloaded(text)
    # A class that a newer peer knows and we do not: still one of ours.
    return (kind or DiptychError)(text)


def _bounded(text: str) -> str:
    return text.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")


_CLASSES: Final = {kind.__name__: kind for kind in CODES}
