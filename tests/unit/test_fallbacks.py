"""Each reason for another way is a word of a closed set, counted by its worker, and told to the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from diptych.domain.errors import StoreUnavailable
from diptych.domain.fallbacks import DISAGGREGATED, KV_BYTES, LOCAL, Fallback, PathReason, fallback_named
from diptych.domain.hashing import chunk_hashes
from diptych.domain.ids import BlockHash, Cell, ChunkHash, Epoch, RequestId, WorkerId
from diptych.domain.ports import Region, RemotePiece
from diptych.domain.records import ChunkLocation, Role, Tier, WorkerRecord
from diptych.domain.sampling import SamplingParams
from diptych.rpc.chunks import Lent, Missed
from services.decode import admission
from services.decode import messages as d
from services.decode.channels import Choice
from services.prefill import messages as p
from services.prefill.lending import Borrowings, Lending
from tests.support.pair_rig import PairRig

LONG, SHORT = 40, 6
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def prompt(num_tokens: int) -> list[int]:
    return [(7 * i + i * i % 31) % 256 for i in range(num_tokens)]


def ask(rig: PairRig, num_tokens: int = LONG) -> d.TrailInfo:
    rig.submit("a", prompt(num_tokens), PARAMS)
    rig.pump()
    return trail(rig)


def trail(rig: PairRig) -> d.TrailInfo:
    (finish,) = rig.finishes["a"]
    assert finish.reason == "length"
    return finish.trail


def around(rig: PairRig, *surroundings: Any) -> None:
    rig.tell(d.DecodeInbox(surroundings=[d.Surroundings(*surroundings)]))


def lost_job(reason: Fallback) -> Callable[[PairRig], object]:
    def story(rig: PairRig) -> None:
        rig.takes_jobs = [False]
        ask_without_end(rig)
        rig.tell(d.DecodeInbox(lost_jobs=[d.JobLost(RequestId("a"), reason)]))
        rig.takes_jobs = [True]
        rig.pump()

    return story


def ask_without_end(rig: PairRig) -> None:
    rig.submit("a", prompt(LONG), PARAMS)
    rig.pump()
    assert "a" not in rig.finishes


def failed(kind: str) -> Callable[[PairRig], object]:
    def story(rig: PairRig) -> None:
        rig.submit("a", prompt(LONG), PARAMS)
        rig.pump(until=lambda: bool(rig.attempts))
        rig.fail_attempt("a", 1, kind)
        rig.pump()

    return story


def late_begin(rig: PairRig) -> None:
    rig.takes_jobs = [False]
    ask_without_end(rig)
    rig.clock.now += 10.1
    rig.pump()


def silence(rig: PairRig) -> None:
    rig.transit = lambda message: [] if isinstance(message, p.ManifestReady) else [message]
    ask_without_end(rig)
    rig.transit = lambda message: [message]
    rig.clock.now += 5.0
    rig.pump()


def bad_reads(kind: str) -> Callable[[PairRig], object]:
    def story(rig: PairRig) -> None:
        for number in (1, 2):
            getattr(rig.faults, kind)(number)
        ask(rig)

    return story


def manifest_with(**changed: Any) -> Callable[[PairRig], object]:
    def story(rig: PairRig) -> None:
        def carry(message: object) -> list[object]:
            return [replace(message, **changed) if isinstance(message, p.ManifestReady) else message]

        rig.transit = carry
        rig.submit("a", prompt(LONG), PARAMS)
        rig.pump()

    return story


def lack(*surroundings: Any) -> Callable[[PairRig], object]:
    def story(rig: PairRig) -> None:
        around(rig, *surroundings)
        ask(rig)

    return story


def worse_channel(reason: Fallback) -> Callable[[PairRig], object]:
    """The rig has one channel: which of several is chosen, and why, is for `test_channels`."""

    def story(rig: PairRig) -> None:
        choice: Any = rig.decode._handoffs._choice
        choice.choose = lambda piece, *_: Choice(piece, reason)
        ask(rig)

    return story


STORIES: dict[Fallback, Callable[[PairRig], object]] = {
    Fallback.NO_PREFILL_WORKER: lack(0, True),
    Fallback.STORE_UNAVAILABLE: lack(1, False),
    Fallback.LINK_TOO_SLOW: lack(0, True, 1),
    Fallback.BEGIN_TIMEOUT: late_begin,
    Fallback.CLAIM_STALLED: lost_job(Fallback.CLAIM_STALLED),
    Fallback.JOB_GONE: lost_job(Fallback.JOB_GONE),
    Fallback.PREFILL_LOST: failed("PeerLost"),
    Fallback.PREFILL_STALLED: silence,
    Fallback.PREFILL_FAILED: failed("Internal"),
    Fallback.PREFILL_TOO_SMALL: failed("TooLarge"),
    Fallback.TRANSFER_FAILED: bad_reads("fail"),
    Fallback.DIGEST_WRONG: bad_reads("corrupt"),
    Fallback.LAYOUT_MISMATCH: manifest_with(fingerprint="another"),
    Fallback.CHANNEL_NOT_SPOKEN: worse_channel(Fallback.CHANNEL_NOT_SPOKEN),
    Fallback.CHANNEL_TOO_SLOW: worse_channel(Fallback.CHANNEL_TOO_SLOW),
    Fallback.CHANNEL_FAILED: worse_channel(Fallback.CHANNEL_FAILED),
    # What the prefill worker says; the tests below show that it does.
    Fallback.BORROW_NO_DIRECTORY: manifest_with(fallbacks={"borrow_no_directory": 1}),
    Fallback.BORROW_REFUSED: manifest_with(fallbacks={"borrow_refused": 1}),
    Fallback.BORROW_FAILED: manifest_with(fallbacks={"borrow_failed": 1}),
    Fallback.UNKNOWN: manifest_with(fallbacks={"a word of tomorrow": 1}),
}


@pytest.mark.parametrize("reason", Fallback)
def test_a_fallback_is_counted_and_told(reason: Fallback) -> None:
    rig = PairRig()
    STORIES[reason](rig)
    assert trail(rig).fallbacks == {reason: 1}
    counters = rig.decode.load().counters
    assert {name: counters[name] for name in Fallback if name in counters} == {reason: 1}
    is_local = trail(rig).path == "local"
    assert counters.get(DISAGGREGATED, 0) == (not is_local)
    assert sum(count for name, count in counters.items() if name.startswith(LOCAL)) == is_local
    rig.clock.now += 31.0  # leases of chunks that nobody came for
    rig.pump()
    rig.assert_empty()
    rig.close()


def path(reason: PathReason, monkeypatch: pytest.MonkeyPatch) -> d.TrailInfo:
    rig = PairRig(colocated=reason is PathReason.COLOCATED)
    match reason:
        case PathReason.NO_PREFILL_WORKER | PathReason.STORE_UNAVAILABLE | PathReason.LINK_TOO_SLOW:
            STORIES[Fallback(reason)](rig)
        case PathReason.ATTEMPTS_FAILED:
            for attempt in (1, 2):
                if attempt == 1:
                    rig.submit("a", prompt(LONG), PARAMS)
                rig.pump(until=lambda attempt=attempt: len(rig.attempts) == attempt)  # type: ignore[misc]
                rig.fail_attempt("a", attempt)
            rig.pump()
        case PathReason.DECODE_BUSY:
            monkeypatch.setattr(admission, "_is_slower_here", lambda *_: True)
            ask(rig, SHORT)
        case PathReason.SHORT_PROMPT:
            ask(rig, SHORT)
        case _:
            ask(rig)
    counters = rig.decode.load().counters
    rig.close()
    told = trail(rig)
    counted = {
        name: count for name, count in counters.items() if name.startswith(LOCAL) or name == DISAGGREGATED
    }
    assert counted == {LOCAL + reason if told.path == "local" else DISAGGREGATED: 1}
    assert counters.get(KV_BYTES, 0) == told.kv_bytes
    return told


@pytest.mark.parametrize("reason", PathReason)
def test_a_path_is_counted_and_told_with_its_reason(
    reason: PathReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = path(reason, monkeypatch)
    handed_off = reason in (PathReason.LONG_PROMPT, PathReason.DECODE_BUSY)
    assert (told.path, told.path_reason) == ("disaggregated" if handed_off else "local", reason)
    assert (told.kv_bytes > 0) == handed_off
    expected = {
        PathReason.ATTEMPTS_FAILED: {Fallback.PREFILL_LOST: 2},
        PathReason.NO_PREFILL_WORKER: {Fallback.NO_PREFILL_WORKER: 1},
        PathReason.STORE_UNAVAILABLE: {Fallback.STORE_UNAVAILABLE: 1},
        PathReason.LINK_TOO_SLOW: {Fallback.LINK_TOO_SLOW: 1},
    }
    assert told.fallbacks == expected.get(reason, {})


def test_ten_plain_requests_are_ten_hand_offs() -> None:
    rig = PairRig()
    for number in range(10):
        rig.submit(f"r{number}", [number, *prompt(LONG)], PARAMS)
    rig.pump()
    counters = rig.decode.load().counters
    assert counters[DISAGGREGATED] == 10
    assert counters[KV_BYTES] == 10 * (LONG + 1) * 8
    assert not [name for name in counters if name.startswith(LOCAL) or name in set(Fallback)]
    rig.close()


def test_a_word_of_another_version_has_a_name_too() -> None:
    assert [fallback_named(word) for word in ("", "begin_timeout", "x")] == [
        Fallback.UNKNOWN, Fallback.BEGIN_TIMEOUT, Fallback.UNKNOWN,
    ]  # fmt: skip


# What a prefill worker could not borrow.

CACHE = WorkerRecord(WorkerId("cache-0"), Role.CACHE, Epoch(3), Cell("main"), "", "", "127.0.0.1:1")
KEY = p.AttemptKey(RequestId("a"), 1)  # type: ignore[arg-type]
ROOT = BlockHash(bytes(16))
TOKENS = prompt(700)
LENT = Lent(7, 256, RemotePiece(Region("memory", "m", b"k", 9), 0, 8), b"")


class FakeStore:
    """Membership, directory and cache in one: who holds what is said, and what each of them lends."""

    def __init__(self, said: int | None, lends: int) -> None:
        """`said`: leading chunks that the directory knows of; None: it does not answer."""
        self.said = said
        self.left = lends

    def peers(self, *_: Role) -> tuple[WorkerRecord, ...]:
        return (CACHE,)

    def peer(self, worker_id: WorkerId, epoch: Epoch) -> WorkerRecord:
        return CACHE

    async def locate(
        self, names: list[ChunkHash], alive: object
    ) -> dict[ChunkHash, tuple[ChunkLocation, ...]]:
        if self.said is None:
            raise StoreUnavailable("gone")
        here = (ChunkLocation(CACHE.worker_id, CACHE.epoch, Tier.L2),)
        return dict.fromkeys(names[: self.said], here)

    async def lend(self, address: str, **_: object) -> Lent | Missed:
        self.left -= 1
        return LENT if self.left >= 0 else Missed("absent")


@pytest.mark.parametrize(
    ("said", "lends", "num_borrowed", "fallback"),
    [
        (0, 0, 0, None),
        (2, 2, 2, None),
        (1, 9, 1, None),
        (2, 1, 1, Fallback.BORROW_REFUSED),
        (1, 0, 0, Fallback.BORROW_REFUSED),
        (None, 9, 0, Fallback.BORROW_NO_DIRECTORY),
    ],
)
async def test_only_what_was_said_to_be_there_is_missed(
    said: int | None, lends: int, num_borrowed: int, fallback: Fallback | None
) -> None:
    fake = cast("Any", FakeStore(said, lends))
    lending = Lending(fake, fake, fake, "f")
    assert len(chunk_hashes(ROOT, TOKENS[:-1])) == 2
    found = await lending.borrow(KEY, ROOT, TOKENS)
    assert (len(found.chunks), found.fallback) == (num_borrowed, fallback)
    counted = Counter({name: count for name, count in lending.counters.items() if name in set(Fallback)})
    assert counted == ({fallback: 1} if fallback else {})
    assert found == Borrowings(found.chunks, fallback)
