"""Ours as it serves: the engine process of a `--role both` worker, through its real socket pair and loop.

`python -m bench.drivers.worker MODEL THREADS NUM_BLOCKS MAX_BATCH WEIGHTS`

Prompts of decodes are prefilled once and found in the prefix cache afterwards, so that a measurement is of
decode steps alone. They have one token more than `context`: the one that nobody can have cached.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count
from pathlib import Path

import msgspec

from bench.serve import Op, Pace, prompt, serve
from diptych.domain.ids import RequestId
from diptych.domain.sampling import SamplingParams
from diptych.engine.catalog import ModelRef
from diptych.engine.process import EngineProcess
from diptych.text.tokenizer import load_tokenizer
from services.decode.config import DecodeServiceSettings
from services.decode.messages import DecodeInbox, DecodeOutbox, Submit, TokensOut

_NUM_WARM = 3


class Worker:
    """The I/O process's part, without gRPC: submits in, tokens out."""

    def __init__(
        self, engine: EngineProcess[DecodeOutbox], loop: asyncio.AbstractEventLoop, vocab_size: int
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._vocab_size = vocab_size
        self._names = count(1)
        self._fresh = count(1 << 20)
        self._primed: set[tuple[int, int]] = set()

    def prefill(self, num_tokens: int) -> dict[str, float]:
        """Seconds from the submit to the first token of a prompt that nobody has seen."""
        return self._loop.run_until_complete(self._prefill(num_tokens))

    def decode(self, batch: int, context: int, num_steps: int) -> dict[str, float]:
        """Tokens of `batch` requests while all of them run."""
        return self._loop.run_until_complete(self._decode(batch, context, num_steps))

    async def _prefill(self, num_tokens: int) -> dict[str, float]:
        begun = time.perf_counter()
        await self._finish([prompt(next(self._fresh), num_tokens, self._vocab_size)], 1)
        return {"seconds": time.perf_counter() - begun, "num_tokens": num_tokens}

    async def _decode(self, batch: int, context: int, num_steps: int) -> dict[str, float]:
        prompts = [prompt(context * 1000 + i, context + 1, self._vocab_size) for i in range(batch)]
        new = [i for i in range(batch) if (context, i) not in self._primed]
        for i in new:
            await self._finish([prompts[i]], 1)
            self._primed.add((context, i))
        pace = Pace(batch, _NUM_WARM, num_steps)
        await self._finish(prompts, _NUM_WARM + num_steps + 4, pace)
        return {"seconds": pace.seconds, "num_tokens": pace.num_tokens}

    async def _finish(self, prompts: list[list[int]], max_tokens: int, pace: Pace | None = None) -> None:
        """Submits all prompts in one message and takes their tokens until each has ended."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        index_of = {RequestId(f"r{next(self._names)}"): i for i in range(len(prompts))}
        submits = [Submit(name, "", "", prompts[i], 0, params, 0) for name, i in index_of.items()]
        self._engine.send(DecodeInbox(submits=submits))
        left = set(index_of)
        while left:
            news: list[TokensOut] = (await self._engine.receive()).tokens
            if pace is not None and news:
                pace.saw([(index_of[out.request_id], len(out.tokens)) for out in news])
            for out in news:
                if out.finish is not None:
                    left.discard(out.request_id)
                    if out.finish.failure is not None:
                        raise RuntimeError(out.finish.failure.message)


def _open() -> tuple[dict[str, object], dict[str, Op]]:
    model, threads, num_blocks, max_batch, weights = sys.argv[1:6]
    settings = DecodeServiceSettings(
        redis_url="unix:///nowhere", worker_id="bench", role="both", model=model, threads=int(threads),
        num_blocks=int(num_blocks), max_batch=int(max_batch), pool_share=1.0, weights=weights,
    )  # fmt: skip
    directory = Path(model)
    told = settings.loop_settings(ModelRef(directory.name, directory, "hf"), load_tokenizer(directory))
    loop = asyncio.new_event_loop()
    engine = EngineProcess("services.decode.loop", msgspec.json.encode(told).decode(), DecodeOutbox)
    begun = time.perf_counter()

    async def start() -> DecodeOutbox:
        await engine.start()
        return await engine.receive()

    ready = loop.run_until_complete(start()).ready
    if ready is None or ready.error is not None:
        raise RuntimeError(ready.error.message if ready and ready.error else "no answer")
    worker = Worker(engine, loop, ready.vocab_size)
    return {"open_s": time.perf_counter() - begun}, {"prefill": worker.prefill, "decode": worker.decode}


if __name__ == "__main__":
    serve(_open)
