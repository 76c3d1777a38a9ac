"""What the processes of a running `diptych up` are full of, and a load that cancels at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diptych.cli.census import Census, find_place, take
from diptych.client import AsyncClient, AsyncGeneration
from tests.support.running_up import RunningUp, marked, wait_until

INSIGHT: Final = Path(__file__).parent / "insight"
WIDTH: Final = 24
"""Requests at a time."""
PROMPTS: Final = (5, 60, 300, 600)
"""Lengths: the last two are handed off."""
MOST_TOKENS: Final = 10
SHARE_CANCELLED: Final = 0.3
NUM_HEADS: Final = 1000


@dataclass
class Fullness:
    """Of one process."""

    command: str
    rss_kib: int
    num_fds: int
    num_threads: int
    num_tasks: int
    num_blocks: int
    """Blocks of memory that Python's allocator has given out."""
    num_objects: int
    kinds: dict[str, int]


@dataclass
class Tally:
    """What became of the load."""

    num_whole: int = 0
    num_left: int = 0
    """Given up by their callers before their end."""
    errors: list[str] = field(default_factory=list)


def insight_environment(folder: Path) -> dict[str, str]:
    """With this, services answer to SIGUSR2."""
    folder.mkdir()
    return {"PYTHONPATH": str(INSIGHT), "DIPTYCH_TEST_INSIGHT": str(folder)}


def look(up: RunningUp) -> dict[str, Fullness]:
    """Every service process, and every engine, by name."""
    folder = Path(up.env["DIPTYCH_TEST_INSIGHT"])
    pids = {pid: words for pid, words in marked(up.env["DIPTYCH_TEST_MARK"]).items() if " services." in words}
    for path in folder.glob("*.json"):
        path.unlink()
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    wait_until(lambda: all((folder / f"{pid}.json").exists() for pid in pids), "all have told", 60.0)
    names = {up.pid_of(name): name for name in ("router-0", "prefill-0", "decode-0", "cache-0")}
    found = {}
    for pid in pids:
        told = json.loads((folder / f"{pid}.json").read_text())
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        name = names.get(pid) or f"{names[parent]}'s engine"
        found[name] = Fullness(
            name, _status(pid, "VmRSS"), len(os.listdir(f"/proc/{pid}/fd")), _status(pid, "Threads"),
            told["num_tasks"], told["num_blocks"], told["num_objects"], told["kinds"],
        )  # fmt: skip
    return found


def census() -> Census:
    """As `diptych audit` finds the `up` whose runtime dir is ours."""
    return asyncio.run(take(find_place("", "", "")))


async def load(router: str, num_requests: int, seed: int) -> Tally:
    """Many requests, of which some are given up: before the first token or after any, at once or after a
    moment."""
    dice, room, tally = random.Random(seed), asyncio.Semaphore(WIDTH), Tally()
    async with AsyncClient(router, timeout_s=120.0) as client:

        async def one(number: int) -> None:
            length, num_tokens = dice.choice(PROMPTS), dice.randint(2, MOST_TOKENS)
            leaves = dice.random() < SHARE_CANCELLED
            stop_at, within_s = dice.randrange(num_tokens), dice.choice((0.0, 0.002, 0.02, 60.0))
            # Heads come again, so that whatever remembers a bounded number of them is full soon.
            head = [*(number % NUM_HEADS).to_bytes(2, "big"), *(7 * i % 256 for i in range(length))]
            prompt = [*head[:length], *(seed + number).to_bytes(4, "big")]
            async with room:
                answer = client.generate(token_ids=prompt, max_tokens=num_tokens, ignore_eos=True)
                try:
                    if leaves:
                        await _leave(answer, stop_at, within_s)
                        tally.num_left += 1
                    else:
                        assert sum([len(piece.tokens) async for piece in answer]) == num_tokens
                        tally.num_whole += 1
                except Exception as error:  # noqa: BLE001 - a client's end is what the test looks at
                    tally.errors.append(repr(error))

        await asyncio.gather(*(one(number) for number in range(num_requests)))
    return tally


async def _leave(answer: AsyncGeneration, stop_at: int, within_s: float) -> None:
    async with answer:
        try:
            async with asyncio.timeout(within_s):
                async for piece in answer:
                    if piece.index >= stop_at:
                        return
        except TimeoutError:
            pass


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {name} of {pid}")
