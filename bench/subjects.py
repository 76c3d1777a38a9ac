"""Everything that can be measured, opened by name: ours, our bare step, and the peers.

Each has `prefill(num_tokens)` and `decode(batch, context, num_steps)`, in tokens a second. A subject that
can't be opened becomes one whose every measurement raises NotRun with the reason.
"""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console

from bench.driver import Driver
from bench.llama_cpp import FORMATS, LlamaCpp, model_file
from bench.peers import find_peer
from bench.stats import NotRun
from diptych.cli.assemble import ALLOCATOR, OPENMP
from diptych.cli.layout import ClusterLayout, children
from diptych.engine import catalog, wheel
from diptych.engine.progress import silent

OURS = "diptych"
OURS_AUTO = "diptych --weights auto"
BARE = "bare step"
VLLM = "vLLM"
HF = "transformers"
LLAMA = {name: f"llama.cpp {name}" for name in FORMATS}
NUM_BLOCKS = 4096
MAX_BATCH = 64


class Subject(Protocol):
    """What is measured. Rates in tokens a second; raises NotRun."""

    def prefill(self, num_tokens: int) -> float: ...

    def decode(self, batch: int, context: int, num_steps: int) -> float: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Driven:
    """A subject behind a driver."""

    driver: Driver

    def prefill(self, num_tokens: int) -> float:
        """Tokens of one prompt a second, up to its first output token."""
        found = self.driver.call("prefill", num_tokens=num_tokens)
        return float(found["num_tokens"] / found["seconds"])

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Output tokens a second of the whole batch."""
        found = self.driver.call("decode", batch=batch, context=context, num_steps=num_steps)
        return float(found["num_tokens"] / found["seconds"])

    def close(self) -> None:
        """Ends its process."""
        self.driver.close()


@dataclass(frozen=True, slots=True)
class Missing:
    """A subject that is not there."""

    why: str

    def prefill(self, num_tokens: int) -> float:
        """Raises NotRun."""
        raise NotRun(self.why)

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Raises NotRun."""
        raise NotRun(self.why)

    def close(self) -> None:
        """Nothing to close."""


def engine_environment(model: str, threads: int) -> dict[str, str]:
    """What `diptych up` would give a worker of this many threads: its OpenMP settings and its allocator."""
    layout = ClusterLayout(
        model, "bench", "unix:///nowhere", num_prefill=0, num_decode=0, num_both=1, cores=threads,
        preload=ctypes.util.find_library(ALLOCATOR) or "", openmp=ctypes.util.find_library(OPENMP) or "",
    )  # fmt: skip
    (worker,) = (child for child in children(layout) if child.module == "services.decode")
    return {name: value for name, value in worker.environment.items() if not name.startswith("DIPTYCH")}


def model_directory() -> str:
    """The default model, fetched and converted if it is not there."""
    return str(catalog.resolve(catalog.DEFAULT).path)


def ours(model: str, threads: int, name: str = OURS) -> Subject:
    """The worker's engine process."""
    weights = "auto" if name == OURS_AUTO else "bf16"
    return _driven(name, [sys.executable, "-m", "bench.drivers.worker", model, str(threads), str(NUM_BLOCKS),
                          str(MAX_BATCH), weights], engine_environment(model, threads))  # fmt: skip


def bare(model: str, threads: int) -> Driven:
    """The runner alone."""
    command = [sys.executable, "-m", "bench.drivers.bare", model, str(threads), str(NUM_BLOCKS)]
    return _driven(BARE, command, engine_environment(model, threads))


def transformers(model: str, threads: int) -> Subject:
    """transformers' own modules."""
    environment = engine_environment(model, threads)
    preload = {name: value for name, value in environment.items() if name == "LD_PRELOAD"}
    command = [sys.executable, "-m", "bench.drivers.hf", model, str(threads)]
    return _driven(HF, command, {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **preload})


def vllm(model: str, threads: int) -> Subject:
    """vLLM with the allocator and the OpenMP that its manual asks for."""
    peer = find_peer("vllm")
    if peer.missing:
        raise NotRun(peer.missing)
    openmp = peer.place.root / "venv" / "lib" / "libiomp5.so"
    allocator = engine_environment(model, threads).get("LD_PRELOAD", "")
    environment = {
        "LD_PRELOAD": ":".join(filter(None, (allocator, str(openmp) if openmp.exists() else ""))),
        "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    command = [str(peer.place.python), "-m", "bench.drivers.vllm_cpu", model, str(threads), str(MAX_BATCH)]
    return _driven(VLLM, command, environment)


def llama(name: str, threads: int) -> Subject:
    """llama.cpp with weights in format `name`."""
    peer = find_peer("llama.cpp")
    if peer.missing:
        raise NotRun(peer.missing)
    return LlamaCpp(peer, model_file(peer, wheel.default_gguf(silent), name), threads)


def _driven(name: str, command: list[str], environment: dict[str, str]) -> Driven:
    return Driven(Driver(name, command, environment))


def openers(model: str, threads: int) -> dict[str, Callable[[], Subject]]:
    """How to open each subject."""
    found: dict[str, Callable[[], Subject]] = {
        OURS: lambda: ours(model, threads),
        OURS_AUTO: lambda: ours(model, threads, OURS_AUTO),
        BARE: lambda: bare(model, threads),
        VLLM: lambda: vllm(model, threads),
        HF: lambda: transformers(model, threads),
    }
    for name, shown in LLAMA.items():
        found[shown] = lambda name=name: llama(name, threads)  # type: ignore[misc]
    return found


@contextmanager
def opened(model: str, threads: int, names: list[str], console: Console) -> Iterator[dict[str, Subject]]:
    """The subjects of these names; all are ended at the end, whatever happened."""
    subjects: dict[str, Subject] = {}
    how = openers(model, threads)
    try:
        for name in names:
            with console.status(f"opening {name}, {threads} threads"):
                try:
                    subjects[name] = how[name]()
                except (NotRun, OSError, subprocess.SubprocessError) as error:
                    console.print(f"{name}: {error}", style="yellow", markup=False, soft_wrap=True)
                    subjects[name] = Missing(str(error))
        yield subjects
    finally:
        for subject in subjects.values():
            subject.close()
