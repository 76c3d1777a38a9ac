"""Several channels between a pair: which one is used, why not the best, and what a process opens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from diptych.domain.errors import InvalidField
from diptych.domain.fallbacks import Fallback
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.ports import KvChannel, Region, RemotePiece
from diptych.domain.records import ChannelEndpoint, Role, WorkerRecord
from diptych.domain.sampling import SamplingParams
from diptych.transfer import nixl_library
from diptych.transfer.faults import Faults, FaultyChannel
from diptych.transfer.open import open_channel
from diptych.transfer.several import ChannelSet
from diptych.worker import channel as worker_channel
from diptych.worker.channel import ChannelSettings, open_kv_channels
from services.decode.channels import SHUN_S, ChannelChoice, Choice
from services.decode.link_watch import LinkWatch
from services.decode.links import LinkBound
from services.decode.messages import ProbeDone, TrailInfo
from tests.contract.channel_rig import Memory, Started, kv_threads
from tests.support.pair_rig import PairRig

NIXL = Region("nixl", "host:1", b"n" * 16, 100)
GRPC = Region("grpc", "host:2", b"g" * 16, 100)
OTHER = replace(NIXL, address="other:1")
BOTH = ChannelChoice(["nixl", "grpc"])


def choose(
    choice: ChannelChoice, *regions: Region, slow: tuple[str, ...] = (), turn: int = 0, now: float = 0.0
) -> tuple[str, Fallback | None]:
    chosen = choice.choose(RemotePiece(regions[0], 7, 9), regions[1:], slow, turn, now)
    assert (chosen.piece.offset, chosen.piece.num_bytes) == (7, 9)
    assert chosen.piece.region in regions
    return chosen.piece.region.kind, chosen.fallback


@pytest.mark.parametrize("regions", [(NIXL, GRPC), (GRPC, NIXL)])
def test_the_reader_decides_which_is_best(regions: tuple[Region, ...]) -> None:
    assert choose(BOTH, *regions) == ("nixl", None)
    assert choose(ChannelChoice(["grpc", "nixl"]), *regions) == ("grpc", None)
    assert choose(ChannelChoice(["grpc"]), *regions) == ("grpc", None)
    assert choose(ChannelChoice(), *regions) == (regions[0].kind, None)


def test_each_way_to_a_worse_one_has_its_reason() -> None:
    assert choose(BOTH, GRPC) == ("grpc", Fallback.CHANNEL_NOT_SPOKEN)
    assert choose(BOTH, NIXL, GRPC, slow=("nixl",)) == ("grpc", Fallback.CHANNEL_TOO_SLOW)
    assert choose(BOTH, NIXL, GRPC, turn=1) == ("grpc", Fallback.CHANNEL_FAILED)


def test_a_channel_that_failed_is_left_alone_for_a_while_to_that_owner() -> None:
    choice = ChannelChoice(["nixl", "grpc"])
    choice.failed(NIXL, 1.0)
    assert choose(choice, NIXL, GRPC, now=1.0) == ("grpc", Fallback.CHANNEL_FAILED)
    assert choose(choice, OTHER, GRPC, now=1.0) == ("nixl", None)
    assert choose(choice, NIXL, GRPC, now=1.0 + SHUN_S) == ("nixl", None)


def test_the_only_one_is_used_whatever_is_said_of_it() -> None:
    choice = ChannelChoice(["nixl", "grpc"])
    choice.failed(NIXL, 0.0)
    assert choose(choice, NIXL, slow=("nixl",), turn=1) == ("nixl", None)


def test_a_piece_of_no_kind_of_ours_is_left_to_the_channel_to_refuse() -> None:
    piece = RemotePiece(replace(NIXL, kind="pigeon"), 0, 1)
    assert BOTH.choose(piece, [], (), 0, 0.0) == Choice(piece)


# The set.


@pytest.fixture
def both() -> Iterator[ChannelSet]:
    channels = ChannelSet([open_channel(kind, "127.0.0.1", 0) for kind in ("nixl", "grpc")])
    yield channels
    channels.close()
    assert kv_threads() == []


def test_one_memory_is_read_over_each_channel(both: ChannelSet) -> None:
    source = Memory.random(1000)
    regions = both.register(source.span)
    assert [region.kind for region in regions] == ["nixl", "grpc"] == list(both.kinds)
    target = Memory(1000)
    both.prepare(target.span)
    for region in regions:
        target.data[:] = 0
        assert Started(both, RemotePiece(region, 0, 1000), target.span).end() is None
        assert np.array_equal(target.data, source.data)
        assert target.guards_hold()


def test_a_kind_that_is_not_open_is_refused(both: ChannelSet) -> None:
    with pytest.raises(ValueError, match="no channel of kind 'pigeon' is open here, only nixl, grpc"):
        both.read(RemotePiece(replace(NIXL, kind="pigeon"), 0, 8), Memory(8).span, 1.0, pytest.fail)


# A pair with both.


def pair(kinds: tuple[str, ...], owner_kinds: tuple[str, ...]) -> PairRig:
    def opened(faults: Faults | None) -> ChannelSet:
        """Faults strike the best of the reader's channels."""
        channels = [open_channel(kind, "127.0.0.1", 0) for kind in (kinds if faults else owner_kinds)]
        if faults is not None:
            channels[0] = FaultyChannel(channels[0], faults)
        return ChannelSet(channels)

    return PairRig(open_channel=opened)


def ask(rig: PairRig, name: str) -> TrailInfo:
    tokens = [len(rig.finishes), *range(200)]
    rig.submit(name, tokens, SamplingParams(max_tokens=1, ignore_eos=True))
    rig.pump()
    trail = rig.finishes[name][0].trail
    assert (trail.path, trail.attempts) == ("disaggregated", 1)
    assert trail.kv_bytes > 0
    return trail


@pytest.mark.parametrize(
    ("kinds", "owner_kinds", "channel", "fallbacks"),
    [
        (("nixl", "grpc"), ("nixl", "grpc"), "nixl", {}),
        (("nixl", "grpc"), ("grpc",), "grpc", {Fallback.CHANNEL_NOT_SPOKEN: 1}),
        (("grpc",), ("nixl", "grpc"), "grpc", {}),
    ],
)
def test_a_pair_takes_the_best_that_both_speak(
    kinds: tuple[str, ...], owner_kinds: tuple[str, ...], channel: str, fallbacks: dict[Fallback, int]
) -> None:
    rig = pair(kinds, owner_kinds)
    trail = ask(rig, "a")
    assert (trail.channel, trail.fallbacks) == (channel, fallbacks)
    assert [rig.decode.load().counters.get(word, 0) for word in fallbacks] == list(fallbacks.values())
    rig.assert_empty()
    rig.close()
    assert kv_threads() == []


def test_a_read_that_fails_goes_on_over_the_next_channel_within_the_attempt() -> None:
    rig = pair(("nixl", "grpc"), ("nixl", "grpc"))
    rig.faults.fail(1)
    trail = ask(rig, "a")
    assert (trail.channel, trail.fallbacks) == ("grpc", {Fallback.CHANNEL_FAILED: 1})
    rig.faults.clear()
    trail = ask(rig, "b")
    assert (trail.channel, trail.fallbacks) == ("grpc", {Fallback.CHANNEL_FAILED: 1}), (
        "left alone for a while"
    )
    rig.clock.now += SHUN_S
    assert ask(rig, "c").channel == "nixl"
    rig.assert_empty()
    rig.close()


# What a process opens.


def opened(kinds: str, **changes: str) -> tuple[str, ...]:
    channels = open_kv_channels(ChannelSettings(kinds, "127.0.0.1", "127.0.0.1", **changes))  # type: ignore[arg-type]
    channels.close()
    return channels.kinds


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("auto", ("nixl", "grpc")),
        ("grpc", ("grpc",)),
        ("grpc,nixl", ("grpc", "nixl")),
        ("nixl,nixl", ("nixl",)),
    ],
)
def test_channels_are_opened_as_they_are_named(kinds: str, expected: tuple[str, ...]) -> None:
    assert opened(kinds) == expected
    assert kv_threads() == []


def refuse(*_: object) -> str:
    raise InvalidField("kv channel", "UCX does not start here")


def test_auto_does_without_nixl_where_it_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_channel, "installed", lambda: "")
    assert opened("auto") == ("grpc",)
    monkeypatch.undo()
    monkeypatch.setattr(nixl_library, "ucx_configurations", refuse)
    monkeypatch.setattr("diptych.transfer.nixl.ucx_configurations", refuse)
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        assert opened("auto") == ("grpc",)
    assert caplog.messages == ["KV crosses without nixl: kv channel: UCX does not start here"]
    with pytest.raises(InvalidField, match="UCX does not start here"):
        opened("nixl,grpc")
    with pytest.raises(InvalidField, match="UCX does not start here"):
        opened("grpc,nixl")
    assert kv_threads() == []


def test_rdma_without_a_device_is_said() -> None:
    with pytest.raises(InvalidField, match="UCX does not start here"):
        opened("nixl", nixl_transport="rdma")


@pytest.fixture
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import trustme

    folder = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    pair.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return {f"tls_{name}": str(folder / f"{name}.pem") for name in ("cert", "key", "ca")}


def test_with_tls_nothing_crosses_that_does_not_encrypt(pem: dict[str, str]) -> None:
    assert opened("auto", **pem) == ("grpc",)
    with pytest.raises(InvalidField, match="nixl does not encrypt"):
        opened("nixl,grpc", **pem)


# The latency guard, a channel at a time.


def test_a_channel_that_is_too_slow_is_refused_and_the_other_used() -> None:
    peer = WorkerRecord(
        WorkerId("p"), Role.PREFILL, Epoch(1), "main", "toy", "f", "host:9",  # type: ignore[arg-type]
        (ChannelEndpoint("nixl", "host:1", 1, "ab", 64), ChannelEndpoint("grpc", "host:2", 1, "cd", 64)),
    )  # fmt: skip
    now = [0.0]
    watch = LinkWatch(LinkBound(50e-6, True), lambda: [peer], lambda: ["nixl", "grpc"], lambda: now[0])
    kinds = []
    for rtt_s in (1e-3, 1e-6):
        asked = watch.ask()
        assert asked is not None
        kinds.append(asked.region.kind)
        watch.measured(ProbeDone(asked.worker_id, asked.epoch, [rtt_s], channel=asked.region.kind))
    assert sorted(kinds) == ["grpc", "nixl"]
    name = (WorkerId("p"), Epoch(1))
    assert watch.refused_kinds(name) == kinds[:1]
    assert not watch.refuses(name)
    assert {link.channel: link.used for link in watch.links()} == {kinds[0]: False, kinds[1]: True}
    now[0] += 60.0
    asked = watch.ask()
    assert asked is not None
    watch.measured(ProbeDone(*name, [1.0], channel=kinds[1]))
    watch.measured(ProbeDone(*name, [1.0], channel=kinds[1]))
    assert watch.refuses(name)


def test_all_kinds_of_channel_know_how_to_be_told_of_memory(both: ChannelSet) -> None:
    channel: KvChannel = open_channel("memory", "127.0.0.1", 0)
    channel.prepare(Memory(8).span)
    channel.close()
    assert ChannelSet.of(channel).kinds == ("memory",)
    assert ChannelSet.of(both) is both
