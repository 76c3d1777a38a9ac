"""Contiguous memory against paged memory under the real scheduler, and the curve that `bench.batch` draws."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import batch
from bench.closed_loop import MAXIMA, PROMPTS, ClosedLoop, declared, pools_of
from bench.contiguous import ContiguousPools
from bench.harness import Options
from bench.stats import NotRun
from diptych.domain.blocks import OutOfBlocks
from diptych.domain.holding import Holding
from diptych.engine.toy import ToyRunner

BLOCK = 16
NUM_BLOCKS = 100


def contiguous(num_blocks: int = 10, maximum: int = 64) -> ContiguousPools:
    return ContiguousPools(num_blocks, BLOCK, lambda _: maximum)


def reserve(pools: ContiguousPools, num_tokens: int) -> Holding:
    holding = pools.open([], 0)
    holding.grow(num_tokens)
    return holding


def test_the_declared_maximum_is_reserved_at_once_and_in_a_row() -> None:
    pools = contiguous()
    holding = reserve(pools, 17)
    assert list(holding.tables[0]) == [0, 1, 2, 3]
    assert (holding.num_tokens, pools.num_free_blocks) == (64, 6)
    holding.grow(64)
    with pytest.raises(OutOfBlocks, match="65 tokens wanted, 64 reserved"):
        holding.grow(65)


def test_free_memory_in_pieces_is_of_no_use() -> None:
    """10 blocks: 4, 4 and 2 of them; with the first and the last free, 6 are, and no 5 in a row."""
    pools = contiguous()
    first, _ = reserve(pools, 1), reserve(pools, 1)
    first.release()
    assert pools.num_free_blocks == 6
    assert pools.can_open([], 0, 64)
    assert not pools.can_open([], 0, 65)
    with pytest.raises(OutOfBlocks, match="no run of 5 blocks, 6 are free"):
        reserve(pools, 65)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 120)), max_size=60))
def test_runs_never_overlap_and_join_again(moves: list[tuple[bool, int]]) -> None:
    pools = ContiguousPools(20, BLOCK, lambda num_tokens: num_tokens + 40)
    held: list[Holding] = []
    for releases, number in moves:
        if releases and held:
            held.pop(number % len(held)).release()
        elif pools.can_open([], 0, number):
            held.append(reserve(pools, number))
            assert held[-1].num_tokens >= number + 40
        owned = [block for holding in held for block in holding.tables[0]]
        assert len(owned) == len(set(owned)) == 20 - pools.num_free_blocks
    for holding in held:
        holding.release()
    assert reserve(pools, 20 * BLOCK - 40).num_tokens == 20 * BLOCK


def closed_loop(allocator: str, requests: int, seed: int = 1) -> dict[str, float]:
    runner = ToyRunner(num_blocks=NUM_BLOCKS, block_tokens=BLOCK, max_context=max(MAXIMA))
    return ClosedLoop(runner, pools_of(allocator, NUM_BLOCKS, BLOCK), requests, seed).run(20, 60)


def test_paged_memory_runs_what_contiguous_memory_makes_wait() -> None:
    """100 blocks hold four or five requests at their declared maxima, and more than ten as they are."""
    paged, runs = closed_loop("paged", 10), closed_loop("contiguous", 10)
    assert paged["running"] > 9.0
    assert runs["running"] <= NUM_BLOCKS * BLOCK / min(MAXIMA)
    assert paged["filled"] > runs["filled"]
    assert runs["reserved"] > 2 * runs["filled"]
    assert runs["stranded"] > 0.0 == paged["stranded"]


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_shares_of_the_pool_are_shares(allocator: str) -> None:
    found = closed_loop(allocator, 4)
    assert all(0.0 <= found[what] <= 1.0 for what in ("filled", "reserved", "stranded"))
    assert found["filled"] + found["reserved"] + found["stranded"] <= 1.0 + 1e-9
    assert found["tokens_per_s"] > 0.0
    assert found["tpot_ms"] > 0.0


def test_declared_maxima_leave_room_for_the_prompt() -> None:
    assert all(declared(length) in MAXIMA and declared(length) > length for length in PROMPTS)


class FakeDriver:
    """Answers as a machine would whose contiguous memory is full at 32."""

    def __init__(self, *_: object) -> None:
        self.closed = False

    def call(self, op: str, **said: object) -> dict[str, float]:
        if op == "decode":
            return {"seconds": 1.0, "num_tokens": 100.0}
        requests = float(str(said["batch"]))
        running = requests if said["allocator"] == "paged" else min(requests, 32.0)
        memory = {"filled": 0.2, "reserved": 0.1, "stranded": 0.0}
        return {"tokens_per_s": 10 * running, "tpot_ms": running, "running": running, **memory}

    def close(self) -> None:
        self.closed = True


@contextmanager
def measured_by(monkeypatch: pytest.MonkeyPatch, driver: object) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(batch, "Driver", driver)
        patch.setattr(batch, "model_directory", lambda: "toy")
        patch.setattr(batch, "engine_environment", lambda *_: {})
        yield


def test_the_curve_becomes_rows_a_table_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with measured_by(monkeypatch, FakeDriver):
        report = batch.measure(Options(quick=True, out=tmp_path / "new"), Console(quiet=True))
    found = {(row.name, row.reference_name): (row.ratio, row.met) for row in report.rows}
    assert found["paged: throughput at 64", "paged at 32"] == (2.0, True)
    assert found["contiguous: throughput at 64", "contiguous at 32"] == (1.0, None)
    assert found["throughput at 64", "contiguous at 64"] == (2.0, True)
    assert len(report.sheets[0].lines) == 2 * len(batch.QUICK.batches)
    assert (tmp_path / "new" / "batch.png").read_bytes().startswith(b"\x89PNG")


def test_a_driver_that_does_not_start_leaves_rows_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise NotRun("batch is gone: no memory")

    with measured_by(monkeypatch, broken):
        report = batch.measure(Options(quick=True), Console(quiet=True))
    assert report.rows
    assert all("no memory" in row.why and not row.met for row in report.rows)
