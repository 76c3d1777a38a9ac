"""Every message between services comes again: at once, out of order, after its request's end or a restart.

Real processes with relays between them (`tests/support/relay.py`), which repeat the very bytes. Nothing may
change by it: clients have the ids that they would have had, what is refused is refused with the right status,
and nobody is left holding anything.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import pytest
from redis.asyncio import Redis

from tests.support.message_kinds import (
    BEGIN,
    GIVE_BACK,
    HANDOFF,
    KINDS,
    LEND,
    OFFER,
    READ,
    SESSION,
    Kind,
    described,
    part_of,
)  # fmt: skip
from tests.support.provocations import LONG, Answer, Provocations
from tests.support.relay import DOWN, HERE, UP, Passage, Relays
from tests.support.relayed_system import RelayedSystem
from tests.support.running_up import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STREAM = "diptych:{main}:prefill:main"


@dataclass
class House:
    system: RelayedSystem
    provocations: Provocations

    @property
    def relays(self) -> Relays:
        return self.system.relays

    def disturbed(self, disturbance: Disturbance) -> Answer:
        """Asks until the disturbance has come about, and waits until nothing is left of it all."""
        self.relays.meddle = disturbance
        try:
            answer = self.provocations.run(disturbance.kind.provocation)
            wait_until(lambda: disturbance.done, f"{disturbance.kind} was disturbed")
        finally:
            self.relays.meddle = lambda *_: None
        self.system.settle()
        return answer


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with RelayedSystem(tmp_path_factory.mktemp("relayed")) as system:
        house = House(system, Provocations(system))
        system.settle()
        yield house
        system.settle()

        def is_clean() -> bool:
            return not system.audit()[1]

        wait_until(is_clean, f"the audit finds nothing: {system.audit()[1]}")


@dataclass
class Disturbance:
    """What is done to the first message of a kind. The relays call it."""

    kind: Kind
    house: House
    done: bool = False
    seen: Passage | None = None

    def __call__(self, passage: Passage, direction: str, body: bytes | None) -> list[bytes] | None:
        if self.done:
            return None
        if self.seen is not None:
            return self.after(passage, direction, body)
        kind = self.kind
        if body is None or (passage.method, direction) != (kind.method, kind.direction):
            return None
        if part_of(passage.method, direction, body) != kind.part:
            return None
        self.seen = passage
        return self.first(body)

    def first(self, body: bytes) -> list[bytes] | None:
        raise NotImplementedError

    def after(self, passage: Passage, direction: str, body: bytes | None) -> list[bytes] | None:
        raise NotImplementedError


@dataclass
class Twice(Disturbance):
    """On a stream once more; a call's one message in another call, as soon as the first has its answer."""

    body: bytes = b""
    code: grpc.StatusCode | None = None

    def first(self, body: bytes) -> list[bytes] | None:
        if self.kind.is_streamed:
            self.done = True
            return [body, body]
        self.body = body
        return None

    def after(self, passage: Passage, direction: str, body: bytes | None) -> list[bytes] | None:
        if passage is self.seen and direction == DOWN and self.body:
            asking = threading.Thread(target=self._ask, args=(passage, self.body))
            self.body = b""
            asking.start()
        return None

    def _ask(self, passage: Passage, body: bytes) -> None:
        self.code = self.house.relays.ask(passage.address, passage.method, body)
        self.done = True


@dataclass
class Swapped(Disturbance):
    """It and the next message on its stream change places; at the end of a stream it comes late."""

    held: list[bytes] = field(default_factory=list)

    def first(self, body: bytes) -> list[bytes] | None:
        self.held.append(body)
        return []

    def after(self, passage: Passage, direction: str, body: bytes | None) -> list[bytes] | None:
        if passage is not self.seen or direction != self.kind.direction:
            return None
        self.done = True
        return self.held if body is None else [body, *self.held]


def test_every_kind_of_message_is_in_the_table() -> None:
    assert {kind.name for kind in KINDS} == described()
    assert len({kind.name for kind in KINDS}) == len(KINDS)


REPEATABLE = [kind for kind in KINDS if kind.is_streamed or kind.direction == UP]
"""All but the one answer to a call, which gRPC itself takes once."""


@pytest.mark.parametrize("kind", REPEATABLE, ids=str)
def test_at_once(house: House, kind: Kind) -> None:
    disturbance = Twice(kind, house)
    answer = house.disturbed(disturbance)
    if disturbance.code is not None:
        assert disturbance.code is kind.late
    if kind.is_streamed and kind.provocation == "long":
        assert answer.fallbacks == {}, "a repeated message is passed over, and costs nothing"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.is_streamed], ids=str)
def test_out_of_order(house: House, kind: Kind) -> None:
    house.disturbed(Swapped(kind, house))


def recorded(house: House, kind: Kind, port: int = 0) -> tuple[bytes, ...]:
    """A call as it was begun when the last message of that kind came, and that message."""
    passage, body = found(house, kind, port)
    opening = passage.of(UP)[0]
    return (body,) if body == opening else (opening, body)


def found(house: House, kind: Kind, port: int = 0) -> tuple[Passage, bytes]:
    """The last message of a kind, to that port if one is given, and its call."""
    seen = [
        (passage, body)
        for passage in house.relays.passages
        if passage.method == kind.method and port in (0, int(passage.address.rpartition(":")[2]))
        for way, body in passage.frames
        if way == kind.direction and part_of(passage.method, way, body) == kind.part
    ]
    assert seen, f"no {kind} was seen"
    return seen[-1]


def test_late(house: House) -> None:
    """After its request's end: in a call of its own, and on the stream where it came."""
    before = house.system.settle()
    (session,) = house.relays.lasting(SESSION)
    for kind in KINDS:
        if kind.late is not None:
            passage, _ = found(house, kind)
            code = house.relays.ask(passage.address, kind.method, *recorded(house, kind))
            assert (str(kind), code) == (str(kind), kind.late)
        if kind.method == SESSION:
            house.relays.add(session, kind.direction, found(house, kind)[1])
    assert house.system.settle() == before
    assert house.relays.lasting(SESSION) == [session]
    assert house.provocations.long().fallbacks == {}
    counters = {c.reason: c.count for c in house.system.inspect("decode").counters}
    num_up = sum(kind.method == SESSION and kind.direction == UP for kind in KINDS)
    assert counters["message_repeated"] >= num_up


@pytest.mark.parametrize("part", ["released", "stop", "done"])
def test_what_was_said_of_an_earlier_attempt(house: House, part: str) -> None:
    """It carries no name, and is heard as if it were of this one: that may cost time, and nothing else."""
    (kind,) = (kind for kind in KINDS if kind.name == (HANDOFF, DOWN, part))
    body = found(house, kind)[1]
    told: list[Passage] = []

    def tell(passage: Passage, direction: str, frame: bytes | None) -> list[bytes] | None:
        if (
            frame is not None
            and passage.method == HANDOFF
            and not told
            and part_of(HANDOFF, direction, frame) == "chunk"
        ):
            told.append(passage)
            passage.extra[DOWN].put_nowait(body)
        return None

    house.relays.meddle = tell
    try:
        house.provocations.long()
    finally:
        house.relays.meddle = lambda *_: None
    assert told
    house.system.settle()


async def jobs(redis: Redis) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in await redis.xrange(STREAM)]


def test_a_job_on_the_bus(house: House) -> None:
    """Twice while it waits, and after its request's end."""
    prefill = house.system.services["prefill"]
    prefill.signal(signal.SIGSTOP)
    try:
        call = house.provocations._call(LONG)
        wait_until(lambda: bool(house.system.in_store(jobs)), "the job is on the bus")
        (job,) = house.system.in_store(jobs)

        async def post(redis: Redis) -> None:
            await redis.xadd(STREAM, dict(job))  # type: ignore[arg-type]

        house.system.in_store(post)
    finally:
        prefill.signal(signal.SIGCONT)
    answer = house.provocations._same(house.provocations._whole(call), LONG)
    assert answer.finish is not None

    async def is_empty(redis: Redis) -> bool:
        return not await redis.xlen(STREAM)

    wait_until(lambda: house.system.in_store(is_empty), "both are off the bus")
    before = house.system.settle()
    house.system.in_store(post)
    wait_until(lambda: house.system.in_store(is_empty), "the late one is off the bus")
    assert house.system.settle() == before
    stale = {c.reason: c.count for c in house.system.inspect("prefill").counters}["begin_Stale"]
    assert stale >= 1


@pytest.mark.parametrize("role", ["decode", "cache"])
def test_after_a_restart(house: House, role: str) -> None:
    """The receiver is killed and started again on its ports, and hears what its earlier self was told."""
    house.provocations.borrowed()
    service = house.system.services[role]
    ports = {kind: service.kv_port if kind.method == READ else service.port for kind in KINDS}
    methods = {"decode": (SESSION, BEGIN, HANDOFF), "cache": (OFFER, LEND, GIVE_BACK, READ)}[role]
    kinds = [kind for kind in KINDS if kind.method in methods and kind.restarted is not None]
    old = {kind: recorded(house, kind, ports[kind]) for kind in kinds}
    house.system.restart(role)
    before = house.system.settle()
    for kind, frames in old.items():
        code = house.relays.ask(f"{HERE}:{ports[kind]}", kind.method, *frames)
        assert (str(kind), code) == (str(kind), kind.restarted)
    assert house.system.settle() == before
    assert house.provocations.long().fallbacks == {}


def test_after_a_restart_of_the_router(house: House) -> None:
    """Its earlier self's sessions, replayed to a decode worker that remembers them."""
    kinds = [kind for kind in KINDS if kind.method == SESSION and kind.direction == UP]
    house.provocations.session()
    old = {kind: recorded(house, kind) for kind in kinds}
    house.system.restart("router")
    assert house.provocations.long().fallbacks == {}
    before = house.system.settle()
    for frames in old.values():
        code = house.relays.ask(house.system.services["decode"].address, SESSION, *frames)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert house.system.settle() == before
