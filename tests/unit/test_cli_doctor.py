"""`diptych doctor`: each check on machines that have, lack or break what it looks at; then the report."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from diptych.cli import checks, doctor
from diptych.cli.checks import Finding, State
from diptych.cli.main import main
from diptych.store.embedded import EmbeddedServer

PINS = ["grpcio==1.2", "redis==3.4", 'torch==9.9; extra == "engine"']


def versions(**installed: str) -> Callable[[str], str]:
    def version_of(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    return version_of


def test_python_must_be_new_enough() -> None:
    assert checks.python((3, 10, 9)).state is State.BROKEN
    assert checks.python((3, 11, 0)) == Finding("python", State.OK, "3.11.0")


def test_packages_are_compared_with_their_pins_and_extras_are_not_essential() -> None:
    assert checks.packages(PINS, versions(grpcio="1.2", redis="3.4")).found == "2, as tested"
    other = checks.packages(PINS, versions(grpcio="1.2", redis="4"))
    assert (other.state, other.found) == (State.LACKS, "redis 4 (tested: 3.4)")
    absent = checks.packages(PINS, versions(grpcio="1.2"))
    assert (absent.state, absent.found) == (State.BROKEN, "not installed: redis")


def test_the_pins_of_this_package_are_found() -> None:
    finding = checks.packages()
    assert finding.state is State.OK, finding.found
    assert int(finding.found.partition(",")[0]) >= 15


def test_torch_is_asked_for_its_devices() -> None:
    def told(*gpus: str) -> Finding:
        return checks.torch(lambda _: json.dumps({"version": "2.1", "gpus": gpus}))

    assert told("H200", "H200") == Finding("torch", State.OK, "2.1, H200, H200")
    assert (told().state, told().found) == (State.LACKS, "2.1, CPU")


def test_a_broken_torch_is_a_lack_with_its_reason() -> None:
    def dies(_: str) -> str:
        raise subprocess.SubprocessError("ImportError: libcudart.so")

    finding = checks.torch(dies)
    assert (finding.state, "libcudart" in finding.found) == (State.LACKS, True)


@pytest.mark.engine
def test_the_real_torch_answers() -> None:
    pytest.importorskip("torch")
    assert checks.torch().found.startswith("2.")


def test_nixl_and_the_allocator_cost_speed_only() -> None:
    assert checks.nixl(lambda _: "1.5").state is State.OK
    assert checks.tcmalloc(lambda _: None).state is State.LACKS
    assert checks.tcmalloc(lambda _: "libtcmalloc_minimal.so.4").found == "libtcmalloc_minimal.so.4"


def test_an_engine_that_does_not_answer_is_quoted() -> None:
    def run(command: Sequence[str]) -> str:
        if command[1] == "version":
            raise subprocess.SubprocessError("Cannot connect to the Docker daemon")
        return "2.0"

    finding = checks.containers(run)
    assert (finding.state, finding.found) == (State.LACKS, "Cannot connect to the Docker daemon")
    assert checks.containers(lambda command: command[1]).found == "engine version, compose compose"


def test_no_docker_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert checks.containers().found == "no docker command"


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = checks.ports(port)
        assert (finding.state, finding.found) == (State.LACKS, f"{port}: Address already in use")
    assert checks.ports(port).state is State.OK


def test_cores_and_memory(tmp_path: Path) -> None:
    assert checks.cores(1).state is State.LACKS
    assert checks.cores(2).state is State.OK
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   1048576 kB\n", encoding="ascii")
    assert checks.memory(meminfo).found == "1.0 GiB available"
    assert checks.memory(meminfo).state is State.LACKS
    meminfo.write_text("MemAvailable:   8388608 kB\n", encoding="ascii")
    assert checks.memory(meminfo).state is State.OK
    assert checks.memory(tmp_path / "nothing").state is State.LACKS


def test_redis_that_does_not_answer_is_essential_and_its_password_is_not_shown() -> None:
    finding = checks.redis("redis://:hidden@127.0.0.1:1")
    assert finding.state is State.BROKEN
    assert "hidden" not in finding.found + finding.cost
    assert "127.0.0.1:1" in finding.found


def test_redis_that_answers_and_the_embedded_one(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "v") as server:
        assert checks.redis(server.url).state is State.OK
    assert checks.redis("").found.startswith("embedded")


def test_a_model_that_is_not_here_is_fetched_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    assert checks.model().state is State.LACKS
    place = tmp_path / "models" / "smollm2-135m-instruct"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}", encoding="utf-8")
    assert checks.model() == Finding("model", State.OK, "smollm2-135m")


FINE = Finding("python", State.OK, "3.11.2")
SLOW = Finding("torch", State.LACKS, "[CPU]", "slow")
DEAD = Finding("Redis", State.BROKEN, "gone", "start it")


@pytest.mark.parametrize(
    ("findings", "status", "verdict"),
    [
        ([FINE], 0, "Diptych runs here"),
        ([FINE, SLOW], 0, "Diptych runs here; what could be better: torch"),
        ([FINE, SLOW, DEAD], 1, "Diptych can't run here: Redis"),
    ],
)
def test_the_report(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: list[Finding],
    status: int,
    verdict: str,
) -> None:
    monkeypatch.setattr(checks, "ALL", tuple((lambda f=f: f) for f in findings))
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    assert end.value.code == status
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == verdict
    for finding in findings:
        assert finding.found in printed
        assert finding.cost in printed
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json"])
    assert end.value.code == status
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == [f.state for f in findings]


def test_every_check_is_run_on_this_machine() -> None:
    names = [finding.name for finding in doctor.examine()]
    assert len(names) == len(set(names)) == len(checks.ALL)
