"""A model that does not fit is refused before loading, with the sum."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.domain.errors import InvalidField, TooLarge
from diptych.domain.layout import GroupKind, KvDtype, KvLayout, LayerGroup
from diptych.engine import fits
from diptych.engine.fits import Need, available_bytes, fitted_blocks
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings, Profile
from tests.support.tiny_llama import write_config

pytestmark = pytest.mark.engine

MIB = 1 << 20
LAYOUT = KvLayout("m", b"", (LayerGroup(GroupKind.FULL, 8, 4, 64),), KvDtype.FLOAT32)  # 16 KiB a token


def _fitted(need: Need, available_mib: int, max_context: int = 1024) -> int:
    return fitted_blocks(need, LAYOUT, 16, max_context, available_mib * MIB)


def test_blocks_or_bytes_decide_where_given() -> None:
    assert _fitted(Need(MIB, 10, None), 1000) == 10
    assert _fitted(Need(MIB, None, MIB), 1000) == 4


def test_by_default_four_contexts_or_half_of_what_is_left_but_one_context() -> None:
    need = Need(100 * MIB, None, None)
    assert _fitted(need, 10_000) == 4 * 64
    assert _fitted(need, 100 + 256 + 64) == 128
    assert _fitted(need, 100 + 256 + 20) == 64


def test_what_does_not_fit_is_refused_with_the_sum() -> None:
    message = (
        r"m needs 456 MiB: weights 100, KV pool 100 \(400 blocks of 16 tokens\), activations 256; "
        "available: 455 MiB"
    )
    with pytest.raises(TooLarge, match=message):
        _fitted(Need(100 * MIB, 400, None), 455)
    assert _fitted(Need(100 * MIB, 400, None), 456) == 400


def test_a_pool_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(TooLarge, match="holds no block, one takes 262144"):
        _fitted(Need(MIB, None, 262143), 1000)


def test_available_memory_minds_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fits, "_CONTROL_GROUP", tmp_path)
    without = available_bytes("cpu")
    assert without > 100 * MIB
    (tmp_path / "memory.current").write_text(f"{30 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {20 * MIB}\ninactive_file {10 * MIB}\n")
    (tmp_path / "memory.max").write_text(f"{50 * MIB}\n")
    assert available_bytes("cpu") == 30 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes("cpu") > 100 * MIB
    (tmp_path / "memory.stat").write_text("anon 1\n")
    assert available_bytes("cpu") > 100 * MIB


def test_available_memory_minds_a_container_of_the_older_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fits, "_CONTROL_GROUP", tmp_path)
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.usage_in_bytes").write_text(f"{30 * MIB}\n")
    (group / "memory.stat").write_text(f"inactive_file {MIB}\ntotal_inactive_file {10 * MIB}\n")
    (group / "memory.limit_in_bytes").write_text(f"{50 * MIB}\n")
    assert available_bytes("cpu") == 30 * MIB
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_bytes("cpu") > 100 * MIB


def test_what_would_fit_is_said() -> None:
    with pytest.raises(
        TooLarge, match=r"; 396 blocks would fit \(6336 tokens: --num-blocks, --max-context\)"
    ):
        _fitted(Need(100 * MIB, 400, None), 455)
    with pytest.raises(TooLarge, match="; a smaller model is needed, or more memory"):
        _fitted(Need(100 * MIB, 400, None), 300)


def test_opening_refuses_before_it_reads_weights(tmp_path: Path) -> None:
    """There are no weight files here: only the sum can refuse."""
    directory = str(write_config(tmp_path))
    with pytest.raises(TooLarge, match="tmp|needs"):
        open_runner(EngineSettings(directory, memory_bytes=1 << 50))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_path": ""}, "model_path"),
        ({"block_tokens": 0}, "block_tokens: must be at least 1, is 0"),
        ({"threads": 0}, "threads: must be at least 1"),
        ({"num_blocks": 0}, "num_blocks: must be at least 1"),
        ({"memory_bytes": -5}, "memory_bytes: must be at least 1, is -5"),
        ({"max_context": 1}, "max_context: must be at least 2"),
        ({"num_blocks": 3, "memory_bytes": 100}, "not both"),
        ({"profile": Profile.EXACT, "threads": 2}, "threads: the exact profile runs on 1 thread"),
        ({"toy_step_delay_s": -1.0}, "toy_step_delay_s"),
        ({"toy_step_delay_s": float("nan")}, "toy_step_delay_s"),
    ],
)
def test_settings_out_of_bounds(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        EngineSettings(**{"model_path": "toy", **fields})  # type: ignore[arg-type]


def test_a_context_beyond_the_model_s(tmp_path: Path) -> None:
    settings = EngineSettings(str(write_config(tmp_path)), max_context=2000, random_weights_seed=1)
    with pytest.raises(InvalidField, match="max_context: the model has 1024 positions, is 2000"):
        open_runner(settings)


def test_a_shorter_context_and_a_pool_by_bytes(tmp_path: Path) -> None:
    settings = EngineSettings(
        str(write_config(tmp_path)), memory_bytes=1 << 20, max_context=100, random_weights_seed=1
    )
    runner = open_runner(settings)
    assert runner.max_context == 100
    assert runner.num_blocks == ((1 << 20) // (16 * runner.layout.token_bytes),)
