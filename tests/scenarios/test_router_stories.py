"""The router's policy, as stories. Commands:

limits NAME=VALUE …              before anything else; the rest is as in LIMITS
at SECONDS                       the clock
workers NAME[#EPOCH][:CAPACITY[/CONTEXT]][@CELL][+REPORTED][~LINK,…] …
                                 what the registry lists; REPORTED: requests that the worker tells of;
                                 LINK: microseconds to a prefill worker, s past the bound, x and not used
up NAME[#EPOCH]                  its session is open
lost NAME[#EPOCH] REASON         its session broke
arrive ID PROMPT+OUTPUT [!PRIORITY]
finish ID · cancel ID · hand_back ID · tick
show                             load of each worker, and the queue
counters                         why things went another way
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.domain.errors import DiptychError, Draining, Overloaded, PeerLost
from diptych.domain.ids import Cell, ChunkHash, Epoch, RequestId, WorkerId
from diptych.domain.records import Link, Role, WorkerLoad, WorkerRecord
from services.router.decisions import (
    Abort,
    Arrival,
    Decision,
    Dial,
    End,
    HangUp,
    Limits,
    Place,
    Reason,
    WorkerRef,
)
from services.router.policy import RouterPolicy

STORIES = sorted(Path(__file__).parent.glob("router_*.story"))

LIMITS = Limits(
    model="toy",
    cell=Cell("main"),
    max_queue=4,
    max_wait_s=10.0,
    max_share=0.6,
    max_overcommit=2.0,
    output_reserve=50,
    prefix_slack=2,
    cancel_wait_s=1.0,
    max_moves=2,
    moves_per_s=2.0,
    move_burst=2,
    redial_min_s=0.1,
    redial_max_s=2.0,
)

WORKER = re.compile(r"(\w+)(?:#(\d+))?(?::(\d+)(?:/(\d+))?)?(?:@(\w+))?(?:\+(\d+))?(?:~([\dsx,]+))?")


def name_of(ref: WorkerRef) -> str:
    return ref.worker_id if ref.epoch == 1 else f"{ref.worker_id}#{ref.epoch}"


def ref_of(word: str) -> WorkerRef:
    name, _, epoch = word.partition("#")
    return WorkerRef(WorkerId(name), Epoch(int(epoch or 1)))


def link_of(number: int, word: str) -> Link:
    too_slow, used = word[-1] in "sx", word[-1] != "x"
    return Link(WorkerId(f"p{number}"), Epoch(1), int(word.rstrip("sx")) * 1e-6, too_slow=too_slow, used=used)


def record_of(word: str) -> WorkerRecord:
    match = WORKER.fullmatch(word)
    assert match, f"not a worker: {word}"
    name, epoch, capacity, context, cell, reported, told = match.groups()
    links = tuple(link_of(number, link) for number, link in enumerate(told.split(",") if told else ()))
    return WorkerRecord(
        WorkerId(name), Role.DECODE, Epoch(int(epoch or 1)), Cell(cell or "main"), "toy", "f0", f"{name}:1",
        capacity_tokens=int(capacity or 1000), max_context=int(context or 0),
        load=WorkerLoad(num_running=int(reported or 0), links=links),
    )  # fmt: skip


def told(error: DiptychError) -> str:
    after = f" (retry after {error.retry_after_s:g} s)" if isinstance(error, Overloaded) else ""
    return f"{type(error).__name__}: {error}{after}"


def describe(decision: Decision) -> str:
    match decision:
        case Dial(ref, _):
            return f"dial {name_of(ref)}"
        case HangUp(ref, _):
            return f"hang up {name_of(ref)}"
        case Place(request_id, ref, moved):
            return f"place {request_id} on {name_of(ref)}{f' ({moved.value})' if moved else ''}"
        case Abort(request_id, ref):
            return f"abort {request_id} on {name_of(ref)}"
        case End(request_id, error):
            return f"end {request_id}: {told(error)}"


class Story:
    """Runs commands against one policy."""

    def __init__(self) -> None:
        self.policy = RouterPolicy(LIMITS)
        self.now = 0.0

    def run(self, line: str) -> Iterator[str]:
        command, *words = line.split()
        outcome: Iterable[Any] = getattr(self, f"do_{command}")(*words)
        for item in outcome:
            yield item if isinstance(item, str) else describe(item)
        self.policy.check_integrity()

    def do_limits(self, *changes: str) -> Iterable[Decision]:
        values = dict(change.split("=") for change in changes)
        kinds = {name: type(getattr(LIMITS, name)) for name in values}
        self.policy = RouterPolicy(replace(LIMITS, **{n: kinds[n](v) for n, v in values.items()}))
        return ()

    def do_at(self, seconds: str) -> Iterable[Decision]:
        self.now = float(seconds)
        return ()

    def do_workers(self, *words: str) -> Iterable[Decision]:
        return self.policy.set_workers([record_of(word) for word in words], self.now)

    def do_up(self, word: str) -> Iterable[Decision]:
        return self.policy.link_up(ref_of(word), self.now)

    def do_lost(self, word: str, reason: str) -> Iterable[Decision]:
        cause = PeerLost(f"{word} ended the session")
        return self.policy.link_lost(ref_of(word), Reason(reason), cause, self.now)

    def do_arrive(self, name: str, size: str, *more: str) -> Iterable[Decision | str]:
        prompt, output = map(int, size.split("+"))
        priority = next((int(word[1:]) for word in more if word.startswith("!")), 0)
        chunks = next((word.split("/") for word in more if not word.startswith("!")), [])
        prefix = tuple(ChunkHash(chunk.encode()) for chunk in chunks)
        try:
            return self.policy.arrive(Arrival(RequestId(name), prompt, output, priority, prefix), self.now)
        except DiptychError as error:
            return [f"refused: {told(error)}"]

    def do_finish(self, name: str) -> Iterable[Decision]:
        return self.policy.finish(RequestId(name), self.now)

    def do_cancel(self, name: str) -> Iterable[Decision]:
        return self.policy.cancel(RequestId(name), Reason.CLIENT_GONE, self.now)

    def do_hand_back(self, name: str) -> Iterable[Decision]:
        ref = self.policy.worker_of(RequestId(name))
        assert ref, f"{name} is on no worker"
        return self.policy.hand_back(RequestId(name), ref, Draining("this worker is leaving"), self.now)

    def do_tick(self) -> Iterable[Decision]:
        return self.policy.tick(self.now)

    def do_show(self) -> Iterable[str]:
        loads = self.policy.loads()
        for ref in self.policy.usable:
            load = loads.of(ref)
            yield f"{name_of(ref)}: {load.num_requests} requests, {load.num_tokens} tokens"
        yield f"waiting: {self.policy.num_queued}"

    def do_counters(self) -> Iterable[str]:
        return [
            f"{reason.value}: {self.policy.counters[reason]}"
            for reason in Reason
            if self.policy.counters[reason]
        ]


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_router_story(path: Path, golden: Callable[[Path, Callable[[str], Iterable[str]]], None]) -> None:
    golden(path, Story().run)


def test_there_are_stories() -> None:
    assert len(STORIES) >= 8
