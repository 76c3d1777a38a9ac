"""A worker's account of itself, between domain and wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diptych.domain.audit import Held
from diptych.domain.engine_report import EngineLoad, EngineReady
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import Link
from diptych.v1 import common_pb2, worker_pb2


def status_message(
    worker_id: WorkerId,
    role: worker_pb2.Role.ValueType,
    epoch: Epoch,
    ready: EngineReady,
    load: EngineLoad,
    pid: int,
) -> worker_pb2.WorkerStatus:
    """What `Inspect` answers for a worker with an engine."""
    status = worker_pb2.WorkerStatus(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        model=ready.model,
        fingerprint=ready.fingerprint,
        pid=pid,
        load=worker_pb2.Load(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            blocks_owned=load.blocks_owned,
            blocks_total=load.blocks_total,
            slots_used=load.slots_used,
            slots_total=load.slots_total,
            num_tokens=load.num_tokens,
            tpot_s=load.tpot_s,
            ttft_s=load.ttft_s,
        ),
        leaked=load.counters.get("leaked_blocks", 0),
        leak=load.leak,
    )
    status.counters.extend(
        common_pb2.Fallback(reason=reason, count=count) for reason, count in sorted(load.counters.items())
    )
    return status


def held_messages(held: Iterable[Held]) -> list[worker_pb2.Held]:
    """What a process holds, for the wire."""
    return [
        worker_pb2.Held(
            kind=one.kind,
            name=one.name,
            owner=one.owner,
            age_s=one.age_s,
            num_blocks=one.num_blocks,
            ends_in_s=one.ends_in_s,
        )
        for one in held
    ]


def link_messages(links: Iterable[Link]) -> list[worker_pb2.Link]:
    """How far peers are, for the wire."""
    return [
        worker_pb2.Link(
            worker_id=link.worker_id,
            epoch=link.epoch,
            rtt_s=link.rtt_s,
            bytes_per_s=link.bytes_per_s,
            age_s=link.age_s,
            too_slow=link.too_slow,
            used=link.used,
            channel=link.channel,
        )
        for link in links
    ]


@dataclass(frozen=True, slots=True)
class Account:
    """What a worker answered to `Inspect`, as far as its load does not tell it."""

    worker_id: WorkerId
    epoch: Epoch
    num_running: int
    num_waiting: int
    blocks: tuple[int, int, int, int]
    """Free, cached, owned, total; of the first layer group."""
    slots: tuple[int, int]
    """Used, total."""
    held: tuple[Held, ...]
    num_held: int
    leaked: int
    leak: str
    silent_s: float
    links: tuple[Link, ...]
    max_rtt_s: float
    counters: dict[str, int]


def read_account(status: worker_pb2.WorkerStatus) -> Account:
    """The typed form of an answer to `Inspect`."""
    load = status.load
    return Account(
        worker_id=WorkerId(status.worker_id),
        epoch=Epoch(status.epoch),
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        blocks=(load.blocks_free, load.blocks_cached, load.blocks_owned, load.blocks_total),
        slots=(load.slots_used, load.slots_total),
        held=tuple(_read_held(status.held)),
        num_held=status.num_held,
        leaked=status.leaked,
        leak=status.leak,
        silent_s=status.silent_s,
        links=tuple(_read_links(status.links)),
        max_rtt_s=status.max_rtt_s,
        counters={counter.reason: counter.count for counter in status.counters},
    )


def _read_held(messages: Sequence[worker_pb2.Held]) -> Iterable[Held]:
    for message in messages:
        ends_in_s = message.ends_in_s if message.HasField("ends_in_s") else None
        yield Held(message.kind, message.name, message.owner, message.age_s, message.num_blocks, ends_in_s)


def _read_links(messages: Sequence[worker_pb2.Link]) -> Iterable[Link]:
    for message in messages:
        yield Link(
            WorkerId(message.worker_id), Epoch(message.epoch), message.rtt_s, message.bytes_per_s,
            message.age_s, message.too_slow, message.used, message.channel,
        )  # fmt: skip
