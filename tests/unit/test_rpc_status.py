"""Errors across the wire: every class comes back as itself, and a plain client understands it too."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from diptych.domain.errors import (
    CallerError,
    DeadlineExceeded,
    DiptychError,
    Draining,
    Internal,
    InvalidField,
    Overloaded,
    PeerError,
    PeerLost,
    Stale,
    TooLarge,
    Unsupported,
)
from diptych.rpc.dial import Dialer
from diptych.rpc.status import CODES, domain_errors, from_rpc_error, to_status
from tests.support.echo_service import EchoStub, echo_service
from tests.support.rpc_fixtures import Serve

DETAILS = "grpc-status-details-bin"


def tree(root: type[DiptychError] = DiptychError) -> Iterator[type[DiptychError]]:
    yield root
    for kind in root.__subclasses__():
        yield from tree(kind)


def domain_classes() -> list[type[DiptychError]]:
    return [kind for kind in tree() if kind.__module__ == "diptych.domain.errors"]


def sample(kind: type[DiptychError]) -> DiptychError:
    if kind is InvalidField:
        return InvalidField("params.top_p", "must be in (0, 1], is 7")
    if kind is Overloaded:
        return Overloaded("64 requests wait already", retry_after_s=2.5)
    return kind(f"what happened: {kind.__name__} – 漢字")


def failure(code: grpc.StatusCode, details: str = "", *metadata: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


def attributes(error: DiptychError) -> tuple[object, ...]:
    return type(error), str(error), vars(error), error.retry


def test_every_class_has_a_code() -> None:
    assert set(CODES) == set(domain_classes())


async def test_every_class_comes_back_over_the_wire(serving: Serve, dialer: Dialer) -> None:
    sent = {kind.__name__.encode(): sample(kind) for kind in domain_classes()}

    async def unary(request: bytes, context: Any) -> bytes:
        raise sent[request]

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"one token"
        raise sent[request]

    server = await serving(echo_service(unary=unary, stream=stream))
    echo = EchoStub(dialer.channel(server.address))
    for name, error in sent.items():
        with pytest.raises(DiptychError) as whole, domain_errors():
            await echo.unary(name)
        assert attributes(whole.value) == attributes(error)

        received = []
        with pytest.raises(DiptychError) as midway, domain_errors():
            async for item in echo.stream(name):
                received.append(item)
        assert attributes(midway.value) == attributes(error)
        assert received == [b"one token"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidField("max_tokens", "at least 1"), grpc.StatusCode.INVALID_ARGUMENT),
        (Overloaded("full", retry_after_s=0.25), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Draining("leaving"), grpc.StatusCode.UNAVAILABLE),
        (Stale("epoch 3 is gone"), grpc.StatusCode.FAILED_PRECONDITION),
        (Internal("a block has two owners"), grpc.StatusCode.INTERNAL),
    ],
)
def test_a_plain_client_finds_the_details(error: DiptychError, code: grpc.StatusCode) -> None:
    status = to_status(error)
    rich = rpc_status.from_call(failure(status.code, status.details, *status.trailing_metadata))
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    found = [[detail.Unpack(into) for detail in rich.details].count(True) for into in (info, bad, retry)]

    assert (status.code, status.details) == (code, str(error))
    assert (info.reason, info.domain) == (type(error).__name__, "diptych")
    assert found == [1, isinstance(error, InvalidField), isinstance(error, Overloaded | Draining)]
    if isinstance(error, InvalidField):
        assert [(v.field, v.description) for v in bad.field_violations] == [("max_tokens", "at least 1")]
    if isinstance(error, Overloaded):
        assert retry.retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, PeerLost),
        (grpc.StatusCode.CANCELLED, PeerLost),
        (grpc.StatusCode.INTERNAL, PeerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TooLarge),
        (grpc.StatusCode.UNIMPLEMENTED, Unsupported),
        (grpc.StatusCode.INVALID_ARGUMENT, CallerError),
        (grpc.StatusCode.UNAUTHENTICATED, CallerError),
        (grpc.StatusCode.UNKNOWN, PeerError),
        (grpc.StatusCode.ALREADY_EXISTS, PeerError),
    ],
)
def test_a_bare_code_is_read_for_what_it_means(code: grpc.StatusCode, kind: type[DiptychError]) -> None:
    error = from_rpc_error(failure(code, "words of the transport"))
    assert type(error) is kind
    assert str(error) == f"words of the transport ({code.name})"


CONTRADICTION = to_status(Stale("another code")).trailing_metadata[0][1]


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"", CONTRADICTION])
def test_details_that_do_not_belong_are_ignored(garbage: bytes) -> None:
    error = from_rpc_error(failure(grpc.StatusCode.UNAVAILABLE, "gone", (DETAILS, garbage)))
    assert type(error) is PeerLost


def test_a_class_that_only_the_peer_knows_is_still_an_error_of_ours() -> None:
    class NewerKind(Stale):
        """What a later release may add."""

    status = to_status(NewerKind("later"))
    error = from_rpc_error(failure(status.code, status.details, *status.trailing_metadata))

    assert status.code is CODES[Stale]
    assert (type(error), str(error)) == (DiptychError, "later")


@pytest.mark.parametrize("letter", ["x", "é", "🧩", "\udcff", "\x00"])
async def test_a_huge_message_still_arrives(serving: Serve, dialer: Dialer, letter: str) -> None:
    async def unary(request: bytes, context: Any) -> bytes:
        raise InvalidField("prompt", letter * 1_000_000)

    server = await serving(echo_service(unary=unary))
    with pytest.raises(InvalidField, match="^prompt: ") as caught, domain_errors():
        await EchoStub(dialer.channel(server.address)).unary(b"")
    assert 100 < len(caught.value.problem) <= 1024
