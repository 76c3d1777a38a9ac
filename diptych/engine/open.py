"""The engine's front door: settings in, a runner out. torch is imported only when a real model is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence

from diptych.domain.errors import InvalidField
from diptych.domain.ports import Runner
from diptych.engine.settings import TOY, EngineSettings

_TOY_BLOCKS = 1024
_TOY_CONTEXT = 8192


def open_runner(settings: EngineSettings) -> Runner:
    """Loads the model and allocates its KV pool.

    Raises Unsupported for a model that is missing, torn or of another kind, InvalidField for a setting that
    does not go with it, TooLarge when weights and pool do not fit into memory (nothing has been loaded then).
    """
    pin(settings.cores)
    if settings.model_path == TOY:
        return _open_toy(settings)
    from diptych.engine.runner import open_torch_runner

    return open_torch_runner(settings)


def pin(cores: Sequence[int]) -> None:
    """Keeps this process, and the threads that it will start, on these CPU cores; on none: changes nothing.

    Raises InvalidField for a core that this process may not use, and where processes can't be pinned.
    """
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise InvalidField("pin", "this system can't keep a process on its cores")
    usable = os.sched_getaffinity(0)
    for core in cores:
        if core not in usable:
            named = ", ".join(map(str, sorted(usable)))
            raise InvalidField("pin", f"core {core} is not one that this process may use: {named}")
    os.sched_setaffinity(0, cores)


def _open_toy(settings: EngineSettings) -> Runner:
    from diptych.engine.toy import LAYOUT, ToyRunner

    num_blocks = settings.num_blocks or _TOY_BLOCKS
    if settings.memory_bytes is not None:
        num_blocks = max(1, settings.memory_bytes // (LAYOUT.token_bytes * settings.block_tokens))
    return ToyRunner(
        num_blocks=num_blocks,
        block_tokens=settings.block_tokens,
        max_context=settings.max_context or _TOY_CONTEXT,
        step_delay_s=settings.toy_step_delay_s,
    )
