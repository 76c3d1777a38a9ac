"""The user's cache of model files: whole directories, or none.

    <cache>/models/<name>/          a converted model, with `diptych.json` as its seal
    <cache>/models/.<name>.lock     held (flock) by whoever builds it; the kernel lets go when its holder dies
    <cache>/models/.<name>.*.tmp    under construction, swept by the lock's next holder
    <cache>/downloads/              what was fetched, checked by digest before use
    <cache>/digests/                content digests, valid while a file's inode, size and times stay

A directory is built beside its place, synced, sealed and renamed into it, so that a reader sees all of it
or nothing, whoever dies when. The seal lists sizes: a directory that lost or grew a file is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from diptych.domain.errors import DeadlineExceeded

SEAL = "diptych.json"
_BUILD_DEADLINE_S = 1800.0
_POLL_S = 0.1


def cache_dir() -> Path:
    """`DIPTYCH_CACHE`, else `diptych` in the user's cache folder."""
    if own := os.environ.get("DIPTYCH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "diptych"


def install(name: str, identity: str, build: Callable[[Path], None]) -> Path:
    """The directory `name`, built by `build(empty directory)` unless it is there, whole and of this
    `identity`.

    Of several processes one builds while the others wait. Raises whatever `build` raises, and
    DeadlineExceeded when another process builds for half an hour.
    """
    models = cache_dir() / "models"
    final = models / name
    if is_whole(final, identity):
        return final
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{name}.lock"):
        if is_whole(final, identity):
            return final
        for left in models.glob(f".{name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=models))
        try:
            new = work / "new"
            new.mkdir()
            build(new)
            _seal(new, identity)
            if final.exists():
                final.rename(work / "old")
            new.rename(final)
            _sync(models)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


def is_whole(directory: Path, identity: str) -> bool:
    """Whether `directory` was sealed with `identity` and still has every file in its size."""
    try:
        seal = json.loads((directory / SEAL).read_text(encoding="utf-8"))
        sizes: dict[str, int] = seal["sizes"]
        return bool(seal["identity"] == identity) and all(
            (directory / file).stat().st_size == size for file, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def cached_digest(files: Sequence[Path], compute: Callable[[], bytes]) -> bytes:
    """`compute()`, remembered for as long as none of `files` changes inode, size, or time of change."""
    stats = [(str(path.resolve()), path.stat()) for path in files]
    signature = [[p, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for p, s in stats]
    place = cache_dir() / "digests" / f"{_file_name(signature)}.json"
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
        if known["signature"] == signature:
            return bytes.fromhex(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or torn: computed again
    digest = compute()
    with contextlib.suppress(OSError):  # a read-only cache costs time, nothing else
        place.parent.mkdir(parents=True, exist_ok=True)
        _replace(place, json.dumps({"signature": signature, "digest": digest.hex()}).encode())
    return digest


def _file_name(signature: Sequence[Sequence[object]]) -> str:
    return hashlib.blake2b(repr([entry[0] for entry in signature]).encode(), digest_size=16).hexdigest()


def _seal(directory: Path, identity: str) -> None:
    sizes = {}
    for path in sorted(directory.iterdir()):
        sizes[path.name] = path.stat().st_size
        _sync(path)
    _replace(directory / SEAL, json.dumps({"identity": identity, "sizes": sizes}, indent=2).encode())
    _sync(directory)


def _replace(path: Path, content: bytes) -> None:
    """Writes a small file whole or not at all."""
    work = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with work.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _BUILD_DEADLINE_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"{path}: held by another process for half an hour") from None
                time.sleep(_POLL_S)
        yield  # closing the file unlocks
