"""How `diptych generate` finds the router that `diptych up` started: one small file for each running `up`.

    <runtime dir>/diptych/up-<pid>.json     {"router": "127.0.0.1:40123", "pid": 4711, "store": …, "shard": …}

The store's address may hold a password, so nobody else may read the file.

The runtime dir is XDG_RUNTIME_DIR, else the user's cache folder. A file whose process is gone (SIGKILL) is
swept by the next reader. Of several the newest counts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diptych.domain.errors import InvalidField, PeerLost


@dataclass(frozen=True, slots=True)
class RunningUp:
    """Where a running `diptych up` can be asked. `store` may hold a password."""

    router: str
    store: str
    shard: str


def folder() -> Path:
    """Where the files lie."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "diptych"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "diptych" / "run"


@contextlib.contextmanager
def announced(router: str, store: str = "", shard: str = "main") -> Iterator[str]:
    """While entered, `find_router` of any process of this user finds `router`.

    Gives the reason why it does not, or nothing: an unwritable folder keeps nobody from serving.
    """
    path = folder() / f"up-{os.getpid()}.json"
    draft = path.with_suffix(".tmp")
    problem = ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.touch(mode=0o600)
        content = {"router": router, "pid": os.getpid(), "store": store, "shard": shard}
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        problem = str(error)
    try:
        yield problem
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def find_router(given: str = "") -> str:
    """`given`, else DIPTYCH_ROUTER, else the router of the newest `diptych up` of this user.

    Raises InvalidField for an address that is none, PeerLost when nothing runs.
    """
    for source, address in (("--router", given), ("DIPTYCH_ROUTER", os.environ.get("DIPTYCH_ROUTER", ""))):
        if address:
            return _checked(source, address)
    if running := newest():
        return running.router
    raise PeerLost("no router is known: start one with `diptych up`, or name one with --router HOST:PORT")


def newest() -> RunningUp | None:
    """The newest `diptych up` of this user that runs."""
    paths = sorted(folder().glob("up-*.json"), key=_age, reverse=True)
    return next((running for path in paths if (running := _read(path))), None)


def _checked(source: str, address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidField(source, f"must be HOST:PORT, is {address!r}")
    return address


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _read(path: Path) -> RunningUp | None:
    """What a file says whose process is alive; other files are removed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        router, pid = str(content["router"]), int(content["pid"])
        found = RunningUp(router, str(content.get("store", "")), str(content.get("shard", "main")))
        os.kill(pid, 0)
    except (ProcessLookupError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        path.unlink(missing_ok=True)
        return None
    except OSError:
        return None
    return found
