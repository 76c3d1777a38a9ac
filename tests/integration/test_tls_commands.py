"""A system that speaks mutual TLS only: with its variables every command works on it, without them none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import tls_environment
from tests.support.running_up import RunningUp, environment, run, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = "A prompt long enough that its prefill belongs on a prefill worker. " * 8


def told(folder: Path, *command: str, **more: str) -> Any:
    return json.loads(run(folder, *command, "--json", **more).stdout)


def health(folder: Path, address: str, **more: str) -> str:
    command = [sys.executable, "-m", "diptych.cli.health", address]
    done = subprocess.run(
        command, env=environment(folder, **more), capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.split(":")[0].strip()


def test_every_command_shows_its_certificate(tmp_path: Path) -> None:
    tls = tls_environment(tmp_path)
    with RunningUp(tmp_path, **tls) as up:
        assert run(tmp_path, "generate", LONG, "--max-tokens", "4", **tls).returncode == 0

        audited = run(tmp_path, "audit", "--json", **tls)
        members = {member["worker_id"]: member for member in json.loads(audited.stdout)["members"]}
        assert audited.returncode == 0, audited.stdout
        assert set(members) == {"cache-0", "decode-0", "prefill-0", "router-0"}
        assert [name for name, member in members.items() if member["account"] is None] == ["router-0"]
        wait_until(
            lambda: (
                [link["rtt_s"] > 0 for link in told(tmp_path, "net", "--router", up.router, **tls)] == [True]
            ),
            "measured",
        )
        assert health(tmp_path, up.router, **tls) == "SERVING"

        plain = run(tmp_path, "audit", "--json")
        assert plain.returncode == 1
        named = {(finding["where"], finding["what"]) for finding in json.loads(plain.stdout)["findings"]}
        assert named == {(name, "its registration") for name in members}
        assert told(tmp_path, "net") == []
        assert health(tmp_path, up.router) == "no answer"
