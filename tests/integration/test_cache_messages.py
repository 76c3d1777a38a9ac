"""No message changes anything in a cache unless every field of it is in its bounds."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.domain.errors import DiptychError, InvalidField, LayoutMismatch
from diptych.domain.layout import WIRE_VERSION
from diptych.rpc.kv_codec import piece_to_proto
from diptych.rpc.status import from_rpc_error
from diptych.v1 import cache_pb2
from services.cache.arena import ALIGN
from tests.support.cache_rig import FINGERPRINT, NUM_TOKENS, WAIT_S, Offering
from tests.support.cache_service import UNITS, Make, cache_services


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with cache_services(tmp_path) as make:
        yield make


def offer_request(offering: Offering, **changed: Any) -> cache_pb2.OfferRequest:
    told: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "chunk_hash": offering.name,
        "fingerprint": FINGERPRINT,
        "num_tokens": NUM_TOKENS,
        "piece": piece_to_proto(offering.piece),
        "digest": offering.digest,
    }
    return cache_pb2.OfferRequest(**{**told, **changed})


def resized(offering: Offering, offset: int, num_bytes: int, region_bytes: int = 1 << 40) -> Any:
    piece = piece_to_proto(offering.piece)
    piece.offset, piece.num_bytes, piece.region.num_bytes = offset, num_bytes, region_bytes
    return piece


BAD_OFFERS: dict[str, tuple[Callable[[Offering], dict[str, Any]], type[DiptychError], str]] = {
    "no wire version": (lambda _: {"wire_version": 0}, LayoutMismatch, "wire version"),
    "later wire version": (lambda _: {"wire_version": WIRE_VERSION + 1}, LayoutMismatch, "wire version"),
    "no fingerprint": (lambda _: {"fingerprint": ""}, LayoutMismatch, "fingerprint"),
    "fingerprint with a line end": (
        lambda _: {"fingerprint": FINGERPRINT + "\n"},
        LayoutMismatch,
        "fingerprint",
    ),
    "fingerprint of letters": (lambda _: {"fingerprint": "z" * 32}, LayoutMismatch, "fingerprint"),
    "no hash": (lambda _: {"chunk_hash": b""}, InvalidField, "chunk_hash"),
    "long hash": (lambda _: {"chunk_hash": bytes(17)}, InvalidField, "chunk_hash"),
    "short digest": (lambda _: {"digest": bytes(15)}, InvalidField, "digest"),
    "no tokens": (lambda _: {"num_tokens": 0}, InvalidField, "num_tokens"),
    "too many tokens": (lambda _: {"num_tokens": 257}, InvalidField, "num_tokens"),
    "no piece": (lambda _: {"piece": None}, InvalidField, "piece"),
    "no bytes": (lambda o: {"piece": resized(o, 0, 0)}, InvalidField, "piece.num_bytes"),
    "over the budget": (
        lambda o: {"piece": resized(o, 0, UNITS * ALIGN + 1)},
        InvalidField,
        "piece.num_bytes",
    ),
    "past its region": (lambda o: {"piece": resized(o, 1, 64, 64)}, InvalidField, "piece.offset"),
    "oversize": (lambda o: {"piece": resized(o, 0, 2**64 - 1, 2**64 - 1)}, InvalidField, "piece"),
}


@pytest.mark.parametrize("case", BAD_OFFERS)
async def test_a_bad_offer_changes_nothing(make: Make, case: str) -> None:
    rig = await make()
    changed, error, words = BAD_OFFERS[case]
    offering = rig.worker.chunk(0)
    with pytest.raises(grpc.RpcError) as raised:
        await rig.stub.Offer(offer_request(offering, **changed(offering)))
    refused = from_rpc_error(raised.value)
    assert type(refused) is error
    assert words in str(refused)
    assert rig.faults.num_reads == 0
    assert (await rig.status()).load.bytes_used == 0


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"fingerprint": "x"}, LayoutMismatch, "fingerprint"),
        ({"chunk_hash": bytes(15)}, InvalidField, "chunk_hash"),
        ({"lease_s": 0.0}, InvalidField, "lease_s"),
        ({"lease_s": -1.0}, InvalidField, "lease_s"),
        ({"lease_s": math.nan}, InvalidField, "lease_s"),
        ({"lease_s": math.inf}, InvalidField, "lease_s"),
    ],
)
async def test_a_bad_loan_is_refused(
    make: Make, changed: dict[str, Any], error: type[DiptychError], words: str
) -> None:
    rig = await make()
    told = {"chunk_hash": bytes(16), "fingerprint": FINGERPRINT, "lease_s": 1.0, **changed}
    with pytest.raises(grpc.RpcError) as raised:
        await rig.stub.Lend(cache_pb2.LendRequest(**told))
    refused = from_rpc_error(raised.value)
    assert type(refused) is error
    assert words in str(refused)


@pytest.mark.parametrize("method", ["Offer", "Lend", "GiveBack"])
async def test_bytes_that_are_no_message_harm_nobody(make: Make, method: str) -> None:
    rig = await make()
    unlimited = [("grpc.max_send_message_length", -1)]
    chance = random.Random(7)
    async with grpc.aio.insecure_channel(rig.service.address, options=unlimited) as channel:
        call = channel.unary_unary(f"/diptych.v1.Cache/{method}")
        for num_bytes in (1, 17, 300, 4096, 5 << 20):
            with pytest.raises(grpc.RpcError):
                await call(b"\xff" + chance.randbytes(num_bytes), timeout=WAIT_S)
    assert rig.faults.num_reads == 0
    status = await rig.status()
    assert (status.load.bytes_used, status.load.slots_used, len(status.counters)) == (0, 0, 0)
    assert (await rig.offer(rig.worker.chunk(0))).stored
