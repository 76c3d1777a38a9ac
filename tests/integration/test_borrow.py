"""A prompt's whole chunks outlive the workers' own caches: they are borrowed, not computed again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest

from diptych.client import Client, Finish
from diptych.domain.fallbacks import Fallback
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub
from tests.support.running_up import RunningUp, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = [(31 * i + i * i % 17) % 256 for i in range(700)]
WHOLE_CHUNKS = 512


def ask(client: Client) -> tuple[list[int], Finish]:
    pieces = list(client.generate(token_ids=PROMPT, max_tokens=12, ignore_eos=True))
    finish = pieces[-1].finish
    assert finish is not None
    return [token for piece in pieces for token in piece.tokens], finish


def inspect(address: str) -> worker_pb2.WorkerStatus:
    with grpc.insecure_channel(address) as channel:
        return WorkerStub(channel).Inspect(worker_pb2.InspectRequest(fresh=True), timeout=20)


def drop(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        WorkerStub(channel).DropCache(worker_pb2.DropCacheRequest(), timeout=20)
    wait_until(lambda: inspect(address).load.blocks_cached == 0, f"{address} has dropped its cache")


def test_a_dropped_prefix_is_borrowed_from_the_cache_service(tmp_path: Path) -> None:
    with RunningUp(tmp_path) as up, Client(up.router, timeout_s=60.0) as client:
        addresses = {worker.worker_id: worker.address for worker in client.status().workers}
        tokens, first = ask(client)
        assert (first.trail.path, first.trail.num_cached_tokens) == ("disaggregated", 0)
        wait_until(
            lambda: inspect(addresses["cache-0"]).load.bytes_used >= 8 * WHOLE_CHUNKS, "chunks are kept"
        )
        for name in ("prefill-0", "decode-0"):
            drop(addresses[name])

        def borrowed() -> bool:
            again, finish = ask(client)
            assert again == tokens
            assert finish.trail.path == "disaggregated"
            for name in ("prefill-0", "decode-0"):
                drop(addresses[name])
            assert finish.trail.num_borrowed_tokens == finish.trail.num_cached_tokens
            return finish.trail.num_cached_tokens == WHOLE_CHUNKS

        # The directory hears of chunks in batches.
        wait_until(borrowed, "whole chunks are borrowed")
        counters = {counter.reason: counter.count for counter in inspect(addresses["prefill-0"]).counters}
        assert counters["borrowed"] >= 2
        assert not set(Fallback) & counters.keys()
        assert first.trail.num_borrowed_tokens == 0

        os.kill(up.pid_of("cache-0"), signal.SIGSTOP)  # said to hold them, and lends nothing
        try:
            again, finish = ask(client)
        finally:
            os.kill(up.pid_of("cache-0"), signal.SIGCONT)
        assert again == tokens
        assert (finish.trail.path, finish.trail.num_cached_tokens) == ("disaggregated", 0)
        assert finish.trail.fallbacks == {Fallback.BORROW_REFUSED: 1}
        for name in ("prefill-0", "decode-0"):
            counters = {counter.reason: counter.count for counter in inspect(addresses[name]).counters}
            assert counters[Fallback.BORROW_REFUSED] == 1
