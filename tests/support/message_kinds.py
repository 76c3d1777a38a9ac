"""Every kind of message that services send each other, and what becomes of each that comes again.

`KINDS` is written by hand; `described` reads the same from the protos, so that a new message without an
entry here is noticed. A kind is a method, a direction and a part: the field of a message's `oneof`, the set
field of a `SessionResponse`, or "message" where a method has one kind of message only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from google.protobuf.descriptor import Descriptor, FileDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode

import diptych.v1
from tests.support.relay import DOWN, UP

HEARTBEAT: Final = "heartbeat"
MESSAGE: Final = "message"

FOREIGN: Final = {
    "Router": "a client's calls: each is a wish of its own, and the router names the request",
    "Worker": "questions about a process, which change no request",
    "KvMemory": "a question of another channel than this one's, of which nothing is kept",
}
"""Services whose messages no service sends another."""


@dataclass(frozen=True)
class Kind:
    """`late`: the answer to a call that repeats it, once its request has ended. `restarted`: the same after
    its receiver was killed and started again on the same port. None: it is an answer itself, so that nobody
    can be called with it; it is added to a later stream of its method instead.
    """

    method: str
    direction: str
    part: str
    provocation: str
    late: StatusCode | None = None
    restarted: StatusCode | None = None

    @property
    def name(self) -> tuple[str, str, str]:
        return self.method, self.direction, self.part

    @property
    def is_streamed(self) -> bool:
        """Whether other messages may come before and after it."""
        return self.method in (SESSION, HANDOFF) or self.name == (READ, DOWN, MESSAGE)

    def __str__(self) -> str:
        return f"{self.method.rpartition('/')[2]} {self.direction} {self.part}"


SESSION: Final = "/diptych.v1.Decode/Session"
BEGIN: Final = "/diptych.v1.Decode/Begin"
HANDOFF: Final = "/diptych.v1.Decode/Handoff"
OFFER: Final = "/diptych.v1.Cache/Offer"
LEND: Final = "/diptych.v1.Cache/Lend"
GIVE_BACK: Final = "/diptych.v1.Cache/GiveBack"
READ: Final = "/diptych.v1.KvTransfer/Read"

OK, STALE = StatusCode.OK, StatusCode.FAILED_PRECONDITION

KINDS: Final = (
    Kind(SESSION, UP, "hello", "session", STALE, STALE),
    Kind(SESSION, UP, "submit", "long", STALE, STALE),
    Kind(SESSION, UP, "piece", "huge", STALE, STALE),
    Kind(SESSION, UP, "cancel", "cancelled", STALE, STALE),
    Kind(SESSION, UP, HEARTBEAT, "long", STALE, STALE),
    Kind(SESSION, UP, "attach", "attached", STALE, STALE),
    Kind(SESSION, UP, "acknowledge", "long", STALE, STALE),
    Kind(SESSION, DOWN, "welcome", "session"),
    Kind(SESSION, DOWN, "deltas", "long"),
    Kind(SESSION, DOWN, "attached", "attached"),
    Kind(SESSION, DOWN, "piece", "attached"),
    Kind(SESSION, DOWN, "refused", "refused"),
    Kind(SESSION, DOWN, HEARTBEAT, "long"),
    Kind(BEGIN, UP, MESSAGE, "long", STALE, STALE),
    Kind(BEGIN, DOWN, MESSAGE, "long"),
    # The stream of an ended attempt is told so: by an end that says why.
    Kind(HANDOFF, UP, "open", "long", OK, STALE),
    Kind(HANDOFF, UP, "chunk", "long", OK, STALE),
    Kind(HANDOFF, UP, "manifest", "long", OK, STALE),
    Kind(HANDOFF, UP, "failed", "too_large", OK, STALE),
    Kind(HANDOFF, UP, HEARTBEAT, "slow", OK, STALE),
    Kind(HANDOFF, DOWN, "released", "long"),
    Kind(HANDOFF, DOWN, "stop", "cancelled_early"),
    Kind(HANDOFF, DOWN, "done", "long"),
    # Content has a name and a digest: the same chunk again is held already, or right.
    Kind(OFFER, UP, MESSAGE, "long", OK, OK),
    Kind(OFFER, DOWN, MESSAGE, "long"),
    # A loan that nobody uses ends with its lease; a cache that was started again has nothing to lend.
    Kind(LEND, UP, MESSAGE, "borrowed", OK, OK),
    Kind(LEND, DOWN, MESSAGE, "borrowed"),
    Kind(GIVE_BACK, UP, MESSAGE, "borrowed", OK, OK),
    Kind(GIVE_BACK, DOWN, MESSAGE, "borrowed"),
    Kind(READ, UP, MESSAGE, "long", OK, StatusCode.NOT_FOUND),
    Kind(READ, DOWN, MESSAGE, "long"),
)


def described() -> set[tuple[str, str, str]]:
    """Every kind that the protos have, services of `FOREIGN` aside."""
    return {
        (f"/{method.containing_service.full_name}/{method.name}", direction, part)
        for method in _methods()
        if method.containing_service.name not in FOREIGN
        for direction, message in ((UP, method.input_type), (DOWN, method.output_type))
        for part in _parts(message)
    }


def part_of(method: str, direction: str, body: bytes) -> str:
    """Which part a frame is. Fails for a frame that is no message of that method."""
    message = message_of(method, direction, body)
    oneofs = message.DESCRIPTOR.oneofs
    if oneofs:
        return str(message.WhichOneof(oneofs[0].name))
    if message.DESCRIPTOR.name != "SessionResponse":
        return MESSAGE
    told = [field.name for field, _ in message.ListFields() if field.name != "sequence"]
    assert len(told) <= 1, told
    return told[0] if told else HEARTBEAT


def message_of(method: str, direction: str, body: bytes) -> Message:
    """A frame, read."""
    (found,) = (m for m in _methods() if f"/{m.containing_service.full_name}/{m.name}" == method)
    message = GetMessageClass(found.input_type if direction == UP else found.output_type)()
    message.ParseFromString(body)
    return message


def _methods() -> Iterator[MethodDescriptor]:
    for module in iter_modules(diptych.v1.__path__):
        if module.name.endswith("_pb2"):
            file: FileDescriptor = import_module(f"diptych.v1.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                yield from service.methods


def _parts(message: Descriptor) -> list[str]:
    if message.oneofs:
        return [field.name for field in message.oneofs[0].fields]
    if message.name == "SessionResponse":
        return [*(field.name for field in message.fields if field.name != "sequence"), HEARTBEAT]
    return [MESSAGE]
