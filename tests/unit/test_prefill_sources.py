"""Chunks of the send ring: each attempt's are its own, also where two decode workers count alike."""

from __future__ import annotations

import pytest

from diptych.domain.errors import Internal
from diptych.domain.ids import Attempt, Epoch, RequestId, WorkerId
from diptych.domain.records import PrefillJob
from diptych.domain.slots import SlotRing
from diptych.v1 import decode_pb2
from services.prefill.handoff import key_of
from services.prefill.messages import AttemptKey
from services.prefill.sources import CACHE, DECODE, SourceKey, Sources

LEASE_S = 10.0


def key_at(epoch: int) -> AttemptKey:
    """The first attempt of one request, at one start of a decode worker."""
    job = PrefillJob(RequestId("a"), WorkerId("decode"), Epoch(epoch), 700)
    return key_of(job, decode_pb2.BeginResponse(attempt=Attempt(1)))


def test_a_request_that_moved_to_another_decode_worker_has_chunks_of_its_own() -> None:
    ring: SlotRing[SourceKey] = SlotRing(2, 64)
    sources = Sources(ring, LEASE_S)
    before, after = key_at(7), key_at(8)
    assert sources.open(before, 0, {DECODE, CACHE}, 0.0) is not None
    sources.release_all(before, DECODE)  # its decode worker is gone; the cache reads on
    assert sources.open(after, 0, {DECODE, CACHE}, 1.0) is not None
    sources.check_integrity()
    sources.release(before, 0, CACHE)
    assert sources.readers(after, 0) == [CACHE, DECODE]
    assert sources.expire(1.0 + LEASE_S) == {after}
    sources.check_integrity()
    assert ring.audit().taken == 0


def test_a_chunk_has_one_slot() -> None:
    sources = Sources(SlotRing(2, 64), LEASE_S)
    assert sources.open(key_at(7), 0, {DECODE}, 0.0) is not None
    with pytest.raises(Internal, match="open already"):
        sources.open(key_at(7), 0, {DECODE}, 0.0)
