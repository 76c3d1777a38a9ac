"""Greedy continuations of real text through a whole system, and where two lists of them part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from bench.stats import NotRun
from bench.system import System
from diptych.client import AsyncClient
from diptych.text.tokenizer import load_tokenizer

_ROOT = Path(__file__).parents[1]
_PROSE = ("README.md", "CONTRIBUTING.md", "docs/engine.md", "diptych/cli/demo.txt")
_LENGTHS = (17, 40, 64, 100, 129, 180, 256, 257, 300, 400)
_SALTS = count()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two lists of continuations of the same prompts."""

    num_prompts: int
    num_tokens: int
    firsts: tuple[int, ...]
    """Of the pairs that differ: how many tokens they share before."""

    @property
    def equal_share(self) -> float:
        return 1.0 - len(self.firsts) / self.num_prompts

    def line(self, what: str, before: str) -> tuple[str | float, ...]:
        """For a table: what was compared with what came before, pairs that differ, and where."""
        where: tuple[str | float, ...] = ("–", "–")
        if self.firsts:
            where = (min(self.firsts), float(median(self.firsts)))
        return what, before, f"{len(self.firsts)} of {self.num_prompts}", 1.0 - self.equal_share, *where


def prose(directory: Path, file: Path | None = None) -> list[int]:
    """Token ids of `file`, or of the repository's own prose, by the model's tokenizer."""
    files = [file] if file else [_ROOT / name for name in _PROSE]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in files)
    return list(load_tokenizer(directory).encode(text))


def prompts(ids: Sequence[int], num_prompts: int) -> list[list[int]]:
    """Pieces of `ids` in all lengths, spread over the text. Raises NotRun when that is too short."""
    longest = max(_LENGTHS)
    if len(ids) < longest + num_prompts:
        raise NotRun(f"{len(ids)} tokens of text are too few for {num_prompts} prompts")
    stride = (len(ids) - longest) // num_prompts
    lengths = [_LENGTHS[i % len(_LENGTHS)] for i in range(num_prompts)]
    return [list(ids[i * stride : i * stride + length]) for i, length in enumerate(lengths)]


def compare(ours: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Comparison:
    """Pair by pair."""
    firsts = []
    for a, b in zip(ours, others, strict=True):
        if list(a) != list(b):
            pairs = zip(a, b, strict=False)
            firsts.append(next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b))))
    return Comparison(len(ours), max(map(len, ours)), tuple(firsts))


async def continuations(
    system: System, asked: Sequence[Sequence[int]], num_tokens: int, parallel: int, path: str
) -> list[list[int]]:
    """`num_tokens` greedy ids after each prompt, `parallel` at a time; no cached prefix helps.

    Raises NotRun when one of them did not come by `path`.
    """
    salt, room = f"run {next(_SALTS)}", asyncio.Semaphore(parallel)

    async def one(client: AsyncClient, token_ids: Sequence[int]) -> list[int]:
        ids: list[int] = []
        async with room:
            answer = client.generate(
                token_ids=token_ids, max_tokens=num_tokens, ignore_eos=True, temperature=0.0, cache_salt=salt
            )
            async for piece in answer:
                ids += piece.tokens
                if piece.finish is not None and piece.finish.trail.path != path:
                    raise NotRun(f"a prompt went {piece.finish.trail.path}, not {path}")
        return ids

    async with AsyncClient(system.router) as client:
        return list(await asyncio.gather(*(one(client, token_ids) for token_ids in asked)))
