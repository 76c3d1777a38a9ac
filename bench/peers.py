"""`make peers`: builds what we are measured against, each peer in a venv of its own in the user's cache.

    <cache>/peers/<name>/venv/        the peer
    <cache>/peers/<name>/build.log    all that its build said
    <cache>/peers/<name>/steps.json   steps that are done: a killed build goes on where it was
    <cache>/peers/<name>/peer.json    there once its probe has answered: name and version

A peer that can't be built says why; benchmarks then write "not run" in its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from bench.recipes import RECIPES, Place, Recipe, Step
from diptych.engine.model_cache import cache_dir

_STEP_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer as benchmarks see it: usable when `missing` is empty, else that says why not."""

    name: str
    place: Place
    version: str = ""
    missing: str = ""


def peers_dir() -> Path:
    """Where peers are built."""
    return cache_dir() / "peers"


def find_peer(name: str) -> Peer:
    """The peer of that name, built or not."""
    place = Place(peers_dir() / name)
    try:
        version = json.loads((place.root / "peer.json").read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return Peer(name, place, missing=f"{name} is not built: make peers")
    return Peer(name, place, version)


class BuildFailed(Exception):
    """A step of a recipe; the message names it and gives its last words."""


def build(recipe: Recipe, progress: Progress) -> Peer:
    """Runs the steps that are not done yet, then the probe. Raises BuildFailed."""
    place = Place(peers_dir() / recipe.name)
    place.root.mkdir(parents=True, exist_ok=True)
    with _only_builder(place):
        done = _done_steps(place)
        task = progress.add_task(recipe.name, total=len(recipe.steps) + 1)
        for number, step in enumerate(recipe.steps):
            progress.update(task, description=f"{recipe.name}: {step.title}", completed=number)
            command = step.command(place)
            seal = _seal(step, command)
            if seal not in done:
                _run(place, step, command)
                done.append(seal)
                (place.root / "steps.json").write_text(json.dumps(done), encoding="utf-8")
        progress.update(task, description=f"{recipe.name}: probe", completed=len(recipe.steps))
        version = _run(place, Step("probe", recipe.probe), recipe.probe(place)).splitlines()[-1].strip()
        peer = {"name": recipe.name, "what": recipe.what, "version": version}
        (place.root / "peer.json").write_text(json.dumps(peer), encoding="utf-8")
        progress.update(task, description=f"{recipe.name} {version}", completed=len(recipe.steps) + 1)
    return find_peer(recipe.name)


def _seal(step: Step, command: list[str]) -> str:
    """Names a step with all that it depends on: another version is another step."""
    return hashlib.sha256(json.dumps([step.title, command, step.env]).encode()).hexdigest()[:16]


def _done_steps(place: Place) -> list[str]:
    try:
        done = json.loads((place.root / "steps.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [str(entry) for entry in done]


def _run(place: Place, step: Step, command: list[str]) -> str:
    """Runs a step; its standard output. Everything goes to the log as well."""
    with (place.root / "build.log").open("a+", encoding="utf-8") as log:
        log.write(f"\n--- {step.title}: {command}\n")
        log.flush()
        begun = log.tell()
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False,
                env={**os.environ, **step.env}, timeout=_STEP_DEADLINE_S,
            ).returncode  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildFailed(f"{step.title}: {error}") from None
        log.seek(begun)
        said = log.read()
    if status != 0:
        errors = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
        raise BuildFailed(f"{step.title} ended with {status}: {errors[-1].strip()[:300] if errors else ''}")
    return said


@contextlib.contextmanager
def _only_builder(place: Place) -> Iterator[None]:
    with (place.root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildFailed("another build of it is under way") from None
        yield


def main(arguments: list[str]) -> int:
    """Exit status: 0 when every peer that was asked for is there."""
    names = [recipe.name for recipe in RECIPES]
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
    chosen = parser.parse_args(arguments).names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    failures = 0
    with Progress(*columns, Elapsed(), console=console) as progress:
        for recipe in RECIPES:
            if recipe.name not in chosen:
                continue
            try:
                peer = build(recipe, progress)
                console.print(f"{peer.name} {peer.version}: {peer.place.root}", soft_wrap=True)
            except BuildFailed as error:
                failures += 1
                log = peers_dir() / recipe.name / "build.log"
                console.print(f"{recipe.name}: not built: {error}\n  {log}", style="red", markup=False)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
