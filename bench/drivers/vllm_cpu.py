"""vLLM's CPU engine in this process, stepped by hand: without HTTP and without its second process, which
would only slow it down on few cores. Runs in its own venv.

`python -m bench.drivers.vllm_cpu MODEL THREADS MAX_BATCH`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from bench.serve import Op, Pace, prompt, serve

_NUM_WARM = 3


class Vllm:
    """Prompts of decodes are found in its prefix cache, as in ours."""

    def __init__(self, llm: Any, params: Any) -> None:
        self._engine = llm.llm_engine
        self._params = params
        self._names = count(1)
        self._fresh = count(1 << 20)
        self._primed: set[tuple[int, int]] = set()

    def prefill(self, num_tokens: int) -> dict[str, float]:
        """Seconds to the first token of a prompt that nobody has seen."""
        begun = time.perf_counter()
        self._finish([prompt(next(self._fresh), num_tokens)], 1)
        return {"seconds": time.perf_counter() - begun, "num_tokens": num_tokens}

    def decode(self, batch: int, context: int, num_steps: int) -> dict[str, float]:
        """Tokens of `batch` requests while all of them run."""
        prompts = [prompt(context * 1000 + i, context + 1) for i in range(batch)]
        new = [i for i in range(batch) if (context, i) not in self._primed]
        self._finish([prompts[i] for i in new], 1)
        self._primed.update((context, i) for i in new)
        pace = Pace(batch, _NUM_WARM, num_steps)
        self._finish(prompts, _NUM_WARM + num_steps + 4, pace)
        return {"seconds": pace.seconds, "num_tokens": pace.num_tokens}

    def _finish(self, prompts: Sequence[list[int]], max_tokens: int, pace: Pace | None = None) -> None:
        index_of = {}
        for i, tokens in enumerate(prompts):
            name = f"r{next(self._names)}"
            index_of[name] = i
            self._engine.add_request(name, {"prompt_token_ids": tokens}, self._params(max_tokens))
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            if pace is not None:
                pace.saw([(index_of[o.request_id], len(o.outputs[0].token_ids)) for o in outputs])


def _open() -> tuple[dict[str, object], dict[str, Op]]:
    import torch
    import vllm  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    model, threads, max_batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    begun = time.perf_counter()
    llm = vllm.LLM(model, dtype="bfloat16", max_num_seqs=max_batch, max_model_len=4096)

    def params(max_tokens: int) -> Any:
        return vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip

    subject = Vllm(llm, params)
    about = {"open_s": time.perf_counter() - begun, "version": vllm.__version__}
    return about, {"prefill": subject.prefill, "decode": subject.decode}


if __name__ == "__main__":
    serve(_open)
