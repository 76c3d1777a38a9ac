"""The cache's settings: bounds, units, and that each of them reaches the place it is for."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from diptych.rpc.settings import read_settings
from services.cache.arena import ALIGN
from services.cache.config import CacheSettings

URL = "redis://127.0.0.1:6379"


def test_flags_environment_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_MAX_LEASES", "7")
    settings = read_settings(CacheSettings, "cache", ["--redis-url", URL, "--budget-bytes", "2MiB"])
    assert (settings.budget_bytes, settings.max_leases, settings.max_reads) == (2 << 20, 7, 8)
    assert settings.worker_id.startswith("cache-")


def test_the_arena_is_the_budget_in_whole_units() -> None:
    assert CacheSettings(redis_url=URL, budget_bytes=3 * ALIGN + 1).arena_bytes == 3 * ALIGN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget_bytes", ALIGN - 1),
        ("budget_bytes", "1000TiB"),
        ("budget_bytes", "much"),
        ("channel", "pigeon"),
        ("kv_port", 65536),
        ("read_s", 0),
        ("read_s", 601),
        ("read_s", "nan"),
        ("max_reads", 0),
        ("max_leases", 0),
        ("max_lease_s", 0),
        ("max_lease_s", 3601),
    ],
)
def test_what_is_out_of_its_bounds_is_named(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as raised:
        CacheSettings(redis_url=URL, **{field: value})  # type: ignore[arg-type]
    assert [error["loc"] for error in raised.value.errors()] == [(field,)]
