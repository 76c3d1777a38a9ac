"""Which children a cluster has, and with what they are started."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from diptych.cli.layout import ChildSpec, ClusterLayout, children, command, pinned
from diptych.domain.errors import InvalidField
from diptych.domain.records import Role


def layout(**changes: Any) -> ClusterLayout:
    return ClusterLayout(
        **{"model": "toy", "model_name": "toy", "redis_url": "redis://:secret@h:1", **changes}
    )


def flags(spec: ChildSpec) -> dict[str, str]:
    return dict(zip(spec.arguments[::2], spec.arguments[1::2], strict=True))


def test_the_default_is_one_of_each() -> None:
    specs = children(layout())
    assert [(spec.worker_id, spec.role, spec.module) for spec in specs] == [
        ("prefill-0", Role.PREFILL, "services.prefill"),
        ("decode-0", Role.DECODE, "services.decode"),
        ("cache-0", Role.CACHE, "services.cache"),
        ("router-0", Role.ROUTER, "services.router"),
    ]


def test_workers_scale_by_role_and_keep_apart_by_suffix() -> None:
    specs = children(layout(num_prefill=2, num_decode=0, num_both=2, id_suffix="-ab"))
    assert [spec.worker_id for spec in specs] == [
        "prefill-0-ab", "prefill-1-ab", "both-0-ab", "both-1-ab", "cache-0-ab", "router-0-ab",
    ]  # fmt: skip
    assert [flags(spec).get("--role") for spec in specs] == [None, None, "both", "both", None, None]


def test_options_reach_those_whom_they_concern() -> None:
    specs = {
        spec.role: flags(spec) for spec in children(layout(profile="exact", threshold_tokens=9, shard="s"))
    }
    assert {role for role, told in specs.items() if told.get("--profile") == "exact"} == {
        Role.PREFILL,
        Role.DECODE,
    }
    assert {role for role, told in specs.items() if told.get("--threshold-tokens") == "9"} == {Role.DECODE}
    assert {role for role, told in specs.items() if "--model" not in told} == {Role.CACHE}
    assert {told["--shard"] for told in specs.values()} == {"s"}


def test_without_a_threshold_the_service_decides() -> None:
    assert all("--threshold-tokens" not in spec.arguments for spec in children(layout()))


def test_a_secret_reaches_the_router_alone_and_is_on_no_command_line() -> None:
    specs = children(layout(router_secret="hush"))
    assert [spec.role for spec in specs if spec.environment.get("DIPTYCH_SECRET") == "hush"] == [Role.ROUTER]
    assert "hush" not in str([spec.arguments for spec in specs]) + repr(layout(router_secret="hush"))
    assert all("DIPTYCH_SECRET" not in spec.environment for spec in children(layout()))


def test_the_store_and_its_password_are_on_no_command_line() -> None:
    for spec in children(layout()):
        assert "secret" not in " ".join(command(spec, 1))
        assert spec.environment["DIPTYCH_REDIS_URL"] == "redis://:secret@h:1"


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (9, "4")])
def test_engines_share_the_cores_and_those_of_one_thread_sleep_while_they_wait(
    cores: int, threads: str
) -> None:
    specs = children(layout(cores=cores, preload="libx.so", openmp="libomp.so"))
    libraries = "libx.so" if threads == "1" else "libx.so:libomp.so"
    for spec in specs:
        is_engine = spec.role in (Role.PREFILL, Role.DECODE)
        assert spec.environment.get("OMP_NUM_THREADS") == (threads if is_engine else None)
        assert flags(spec).get("--threads") == (threads if is_engine else None)
        sleeps = is_engine and threads == "1"
        assert spec.environment.get("OMP_WAIT_POLICY") == ("PASSIVE" if sleeps else None)
        assert spec.environment.get("LD_PRELOAD") == (libraries if is_engine else None)
    assert all("LD_PRELOAD" not in spec.environment for spec in children(layout()))


def test_exact_keeps_to_one_thread() -> None:
    specs = children(layout(cores=16, profile="exact"))
    assert {flags(spec).get("--threads") for spec in specs} == {"1", None}


def test_the_router_listens_where_it_was_asked_and_can_be_pinned() -> None:
    *others, router = children(layout(router_port=7400))
    assert flags(router)["--listen"] == "127.0.0.1:7400"
    assert {flags(spec)["--listen"] for spec in others} == {"127.0.0.1:0"}
    again = pinned(router, "127.0.0.1:5")
    assert {**flags(router), "--listen": "127.0.0.1:5"} == flags(again)
    assert (again.worker_id, again.environment) == (router.worker_id, router.environment)


def test_the_command_is_tied_to_its_parent() -> None:
    spec = children(layout())[0]
    start = [sys.executable, "-m", "diptych.cli.child", "42", "services.prefill"]
    assert command(spec, 42) == [*start, *spec.arguments]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_prefill": -1}, "prefill"),
        ({"num_decode": 257}, "decode"),
        ({"num_both": -1}, "both"),
        ({"num_decode": 0}, "decode"),
        ({"router_port": 65536}, "port"),
    ],
)
def test_what_cannot_serve_is_refused(changes: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        layout(**changes)
    assert caught.value.field == field
