"""From the options of `up` and `demo` to a cluster that can be started: model, store, port, logs, preload."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes.util
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from diptych.cli.cluster import Cluster
from diptych.cli.console import err, out
from diptych.cli.layout import LOOPBACK, ClusterLayout
from diptych.domain.errors import InvalidField
from diptych.engine.catalog import TOY, resolve
from diptych.engine.fetch import Bars
from diptych.store.connect import connect, redacted
from diptych.store.embedded import EmbeddedServer

ALLOCATOR: Final = "tcmalloc_minimal"
OPENMP: Final = "gomp"
_SECRET: Final = "DIPTYCH_SECRET"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the user asked for; see `diptych up --help`."""

    model: str
    profile: str = "fast"
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    port: int = 0
    redis_url: str = ""
    shard: str = "main"
    threshold_tokens: int | None = None


@contextlib.contextmanager
def assembled(options: UpOptions) -> Iterator[Cluster]:
    """A cluster that is not started yet; stopped at the exit, whatever runs by then.

    Its logs stay where something went wrong: an error, or a child that had to be started again.

    What can be wrong is looked at before anything is started. Raises InvalidField for an option or port that
    can't be had, StoreUnavailable for a store that does not answer, and what `resolve` raises for the model.
    """
    with contextlib.ExitStack() as stack:
        store = None if options.redis_url else EmbeddedServer()
        if store:
            stack.callback(store.stop)
        layout = _layout(options, store.url if store else options.redis_url)
        _check_port(options.port)
        if options.redis_url:
            asyncio.run(_check_store(options.redis_url))
        with Bars(err) as progress:
            model = resolve(options.model, progress)
        # A path, not a hub id: a branch may move between two looks, and all must see the same files.
        layout = replace(layout, model=str(model.path), model_name=model.name)
        logs = Path(tempfile.mkdtemp(prefix="diptych-logs-"))
        _tell(layout, logs)
        cluster = stack.enter_context(Cluster(layout, logs, store))
        yield cluster
        cluster.stop()
        if cluster.num_restarts == 0:  # nobody will want to read them
            shutil.rmtree(logs, ignore_errors=True)


def _layout(options: UpOptions, redis_url: str) -> ClusterLayout:
    """Everything but the model, which may take minutes to fetch: a wrong option is told before."""
    return ClusterLayout(
        model="",
        model_name="",
        redis_url=redis_url,
        num_prefill=options.num_prefill,
        num_decode=options.num_decode,
        num_both=options.num_both,
        router_port=options.port,
        profile=options.profile,
        threshold_tokens=options.threshold_tokens,
        shard=options.shard,
        # On a store of its own a cluster is alone; elsewhere another may run with workers of the same names.
        id_suffix=f"-{secrets.token_hex(2)}" if options.redis_url else "",
        # One that outlives the store and the router both, whichever of them is started again first.
        router_secret="" if options.redis_url or _SECRET in os.environ else secrets.token_urlsafe(32),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        preload=ctypes.util.find_library(ALLOCATOR) or "",
        openmp=ctypes.util.find_library(OPENMP) or "",
    )


def _check_port(port: int) -> None:
    if port:
        try:
            socket.create_server((LOOPBACK, port)).close()
        except OSError as error:
            reason = os.strerror(error.errno or 0)  # the exception's own text repeats the address
            advice = "choose another with --port, or leave it out for a free one"
            raise InvalidField("port", f"cannot listen on {LOOPBACK}:{port} ({reason}): {advice}") from None


async def _check_store(url: str) -> None:
    await (await connect(url)).aclose()


def _tell(layout: ClusterLayout, logs: Path) -> None:
    where = "embedded" if layout.redis_url.startswith("unix://") else redacted(layout.redis_url)
    out.print(f"model {layout.model_name} at {layout.model}", markup=False, soft_wrap=True)
    out.print(f"store {where}, logs in {logs}", markup=False, soft_wrap=True)
    if layout.model != TOY and not layout.preload:
        advice = "workers would be faster with it (Debian: libtcmalloc-minimal4)"
        out.print(f"no lib{ALLOCATOR} here: {advice}", soft_wrap=True)
