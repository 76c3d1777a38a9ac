"""How a runner is to be opened: one frozen object, filled from a service's settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diptych.domain.errors import InvalidField
from diptych.domain.ids import BLOCK_TOKENS

TOY = "toy"


class Profile(Enum):
    """What a runner promises of its numbers."""

    EXACT = "exact"
    """fp32 weights and KV; the logits of a position depend on its prefix alone, to the bit."""
    FAST = "fast"
    """bf16 weights and KV (but see `Weights`); chunking and batching may change the last bits."""


class Weights(Enum):
    """What decode steps read. Prefill reads bf16 always."""

    BF16 = "bf16"
    INT4 = "int4"
    """4-bit weights, in every step that is decodes alone."""
    AUTO = "auto"
    """4-bit weights for as few rows as they are faster for."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What `open_runner` needs.

    `model_path`: a directory with config.json and safetensors, or "toy".
    `num_blocks`: size of the KV pool in blocks; when None, `memory_bytes` decides.
    `memory_bytes`: bytes of the KV pool; when None as well, room for `DEFAULT_CONTEXTS` full contexts, as far
    as memory allows.
    `weights`: beside those of the profile, a copy of the layers in 4 bits for decode steps.
    `threads`: CPU threads of torch; one by default, because a prefill and a decode worker share a machine.
    `cores`: the only CPU cores that the engine's process runs on; empty: as the system likes.
    `max_context`: at most this many positions a sequence; None: what the model was trained for.
    `random_weights_seed`: use seeded random weights of the config's shapes and read no weight files.
    `toy_step_delay_s`: how long a step of the toy takes.
    """

    model_path: str
    profile: Profile = Profile.FAST
    weights: Weights = Weights.BF16
    device: str = "cpu"
    num_blocks: int | None = None
    memory_bytes: int | None = None
    block_tokens: int = BLOCK_TOKENS
    threads: int = 1
    cores: tuple[int, ...] = ()
    max_context: int | None = None
    random_weights_seed: int | None = None
    toy_step_delay_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises InvalidField for the first field that is out of its bounds."""
        if not self.model_path:
            raise InvalidField("model_path", "must name a directory or be 'toy', is empty")
        at_least = {"block_tokens": 1, "threads": 1, "num_blocks": 1, "memory_bytes": 1, "max_context": 2}
        for field, low in at_least.items():
            value = getattr(self, field)
            if value is not None and value < low:
                raise InvalidField(field, f"must be at least {low}, is {value}")
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise InvalidField("num_blocks", "give the pool's size in blocks or in bytes, not both")
        if self.profile is Profile.EXACT and self.weights is not Weights.BF16:
            raise InvalidField("weights", f"the exact profile has one format, is {self.weights.value}")
        if self.profile is Profile.EXACT and self.threads != 1:
            raise InvalidField("threads", f"the exact profile runs on 1 thread, is {self.threads}")
        if not 0.0 <= self.toy_step_delay_s <= 60.0:
            raise InvalidField("toy_step_delay_s", f"must be from 0 to 60, is {self.toy_step_delay_s:g}")
