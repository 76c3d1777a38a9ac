"""transformers: its own modules, cache and attention, called without `generate`'s own cost.

`python -m bench.drivers.hf MODEL THREADS`
"""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import Any

import torch

from bench.serve import Op, prompt, serve

_NUM_WARM = 3


class Transformers:
    """A batch's cache is kept between measurements and cut back to its prompt."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._fresh = count(1 << 20)
        self._caches: dict[tuple[int, int], Any] = {}

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> dict[str, float]:
        """Seconds to the first token."""
        tokens = torch.tensor([prompt(next(self._fresh), num_tokens)])
        begun = time.perf_counter()
        int(self._model(tokens, use_cache=True, logits_to_keep=1).logits.argmax())
        return {"seconds": time.perf_counter() - begun, "num_tokens": num_tokens}

    @torch.inference_mode()
    def decode(self, batch: int, context: int, num_steps: int) -> dict[str, float]:
        """Steps of `batch` sequences from position `context` on."""
        cache = self._cache(batch, context)
        last = torch.full((batch, 1), 1000)
        begun = 0.0
        for number in range(_NUM_WARM + num_steps):
            if number == _NUM_WARM:
                begun = time.perf_counter()
            out = self._model(last, past_key_values=cache, use_cache=True)
            last = out.logits[:, -1:].argmax(-1)
        seconds = time.perf_counter() - begun
        cache.crop(-(_NUM_WARM + num_steps))
        return {"seconds": seconds, "num_tokens": batch * num_steps}

    def _cache(self, batch: int, context: int) -> Any:
        key = (batch, context)
        if key not in self._caches:
            self._caches.clear()
            prompts = torch.tensor([prompt(context * 1000 + i, context) for i in range(batch)])
            self._caches[key] = self._model(prompts, use_cache=True, logits_to_keep=1).past_key_values
        return self._caches[key]


def _open() -> tuple[dict[str, object], dict[str, Op]]:
    import transformers

    torch.set_num_threads(int(sys.argv[2]))
    begun = time.perf_counter()
    load = transformers.AutoModelForCausalLM.from_pretrained
    subject = Transformers(load(sys.argv[1], dtype=torch.bfloat16))
    about = {"open_s": time.perf_counter() - begun, "version": transformers.__version__}
    return about, {"prefill": subject.prefill, "decode": subject.decode}


if __name__ == "__main__":
    serve(_open)
