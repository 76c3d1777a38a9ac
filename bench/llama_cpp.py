"""llama.cpp, by its own benchmark programs: one run of a program for each measurement.

`llama-bench` for prompts and for single sequences at a depth, `llama-batched-bench` for batches. Formats
other than the one that ships are made from it by `llama-quantize`, once, into the peer's folder.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import Peer
from bench.recipes import llama_tool
from bench.stats import NotRun

FORMATS = ("BF16", "Q4_0", "Q4_1")
_SHIPPED = "Q4_1"
_DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """One weight format of it on so many threads. Rates in tokens a second; raises NotRun."""

    peer: Peer
    model: Path
    threads: int

    def prefill(self, num_tokens: int) -> float:
        """A prompt of `num_tokens`, without loading and warm-up."""
        return self._bench("-p", str(num_tokens), "-n", "0")

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """`batch` sequences from position `context` on."""
        if batch == 1:
            return self._bench("-p", "0", "-n", str(num_steps), "-d", str(context))
        size = batch * (context + num_steps)
        said = _output([
            str(llama_tool(self.peer.place, "llama-batched-bench")), "-m", str(self.model), "-c", str(size),
            "-b", "2048", "-ub", "512", "-npp", str(context), "-ntg", str(num_steps), "-npl", str(batch),
            "-t", str(self.threads), "-tb", str(self.threads), "--output-format", "jsonl",
        ])  # fmt: skip
        found: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        if not found:
            raise NotRun("llama-batched-bench printed no figure")
        return float(found[-1]["speed_tg"])

    def close(self) -> None:
        """Nothing runs between measurements."""

    def _bench(self, *arguments: str) -> float:
        said = _output([
            str(llama_tool(self.peer.place, "llama-bench")), "-m", str(self.model), "-t", str(self.threads),
            "-r", "1", "-o", "json", *arguments,
        ])  # fmt: skip
        return float(json.loads(said)[0]["avg_ts"])


def model_file(peer: Peer, shipped: Path, name: str) -> Path:
    """The model in format `name`, made if it is not there. Raises NotRun."""
    if name == _SHIPPED:
        return shipped
    place = peer.place.root / "models" / f"{shipped.stem}-as-{name}.gguf"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        work = place.with_suffix(".tmp")
        tool = str(llama_tool(peer.place, "llama-quantize"))
        _output([tool, "--allow-requantize", str(shipped), str(work), name])
        work.replace(place)
    return place


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRun(f"llama.cpp: {error}") from None
    if done.returncode != 0:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no word")
        raise NotRun(f"{Path(command[0]).name} ended with {done.returncode}: {last[:200]}")
    return done.stdout
