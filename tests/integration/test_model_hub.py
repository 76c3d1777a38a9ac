"""Models by hub id, from a local stand-in of the hub and through the real `huggingface_hub`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import Files, Hub, commit_of
from tests.support.tiny_model import tiny_directory

pytestmark = [pytest.mark.integration, pytest.mark.engine]

WANTED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tiny_directory(tmp_path_factory.mktemp("hub"))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def hub(files: Files) -> Iterator[Hub]:
    extra = {
        "README.md": b"# read me",
        "pytorch_model.bin": b"pickle",
        "onnx/model.onnx": b"onnx",
        "original/model.safetensors": b"other",
        "original/config.json": b"{}",
    }
    next_version = dict(files) | {"config.json": files["config.json"].replace(b"5000.0", b"6000.0")}
    repositories = {
        "org/tiny": {"main": dict(files) | extra, "next": next_version},
        "org/pickle": {"main": {"config.json": files["config.json"], "pytorch_model.bin": b"x"}},
        "org/gated": {"main": files},
    }
    with Hub(repositories, gated=frozenset({"org/gated"})) as served:
        yield served


def fetch(model: str, home: Path, endpoint: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m diptych.engine.fetch`, as a user would run it."""
    own = {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "DIPTYCH_CACHE": str(home / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "diptych.engine.fetch", model],
        capture_output=True, text=True, timeout=50, check=False, env=kept | own | environment,
    )  # fmt: skip


def test_only_what_is_needed_is_fetched_once(hub: Hub, files: Files, tmp_path: Path) -> None:
    done = fetch("org/tiny", tmp_path, hub.endpoint)
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.strip())
    assert {path.name: path.read_bytes() for path in place.iterdir()} == files
    assert set(hub.requests) == WANTED
    hub.requests.clear()
    again = fetch("org/tiny", tmp_path, hub.endpoint)
    assert again.stdout == done.stdout
    assert hub.requests == []


def test_a_revision(hub: Hub, tmp_path: Path) -> None:
    branch = fetch("org/tiny@next", tmp_path, hub.endpoint)
    assert branch.returncode == 0, branch.stderr
    place = Path(branch.stdout.strip())
    assert b"6000.0" in (place / "config.json").read_bytes()
    commit = commit_of(hub.repositories["org/tiny"]["next"])
    assert fetch(f"org/tiny@{commit}", tmp_path, hub.endpoint).stdout == branch.stdout
    main = fetch("org/tiny", tmp_path, hub.endpoint)
    assert main.stdout not in ("", branch.stdout)


def test_a_broken_download_never_becomes_a_model(hub: Hub, files: Files, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = 1000
    done = fetch("org/tiny", tmp_path, hub.endpoint)
    if done.returncode == 0:  # resumed within the same call
        place = Path(done.stdout.strip())
    else:
        assert "did not deliver it" in done.stderr
        place = Path(fetch("org/tiny", tmp_path, hub.endpoint).stdout.strip())
    assert (place / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_without_the_hub_what_is_here_serves(hub: Hub, tmp_path: Path) -> None:
    done = fetch("org/tiny", tmp_path, hub.endpoint)
    closed = "http://127.0.0.1:9"
    assert fetch("org/tiny", tmp_path, closed).stdout == done.stdout
    assert fetch("org/tiny", tmp_path, closed, HF_HUB_OFFLINE="1").stdout == done.stdout
    missing = fetch("org/other", tmp_path, closed)
    assert missing.returncode == 1
    assert f"diptych: org/other: {closed} did not deliver it" in missing.stderr


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/nothing", "model: org/nothing is no directory here, and {endpoint} does not know it"),
        ("org/tiny@v9", "model: org/tiny at {endpoint} has no revision 'v9'"),
        ("org/gated", "model: org/gated is gated at {endpoint}: log in there, accept, set HF_TOKEN"),
        ("org/pickle", "org/pickle: holds no safetensors, the only weights that are read from the hub"),
    ],
)
def test_what_can_not_be_had(hub: Hub, tmp_path: Path, model: str, expected: str) -> None:
    done = fetch(model, tmp_path, hub.endpoint)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"diptych: {expected.format(endpoint=hub.endpoint)}\n" in done.stderr
    assert "Traceback" not in done.stderr
