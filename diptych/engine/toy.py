"""The toy model: deterministic, torch-free, and unforgiving about its KV.

**Theory of operation.** Every position has a record of 8 bytes in the pool: K is the token id and the
position, V a running check over the K so far that continues from the V read back at the position before.
The next token is a hash of *all* records from position 0 on, read back from the blocks. So one wrong,
stale, swapped or missing byte of KV anywhere changes the text from there on, which is what tests of hand-
off, preemption and resuming look at.

The vocabulary is the 256 bytes and one end of sequence. Output is printable ASCII, sometimes a smiley (four
tokens, finished once begun), and now and then the end. The pool starts as garbage, and an aborted step
leaves garbage in its tokens' positions, as a real runner may.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from diptych.domain.errors import Internal
from diptych.domain.ids import BlockId
from diptych.domain.layout import GroupKind, KvDtype, KvLayout, LayerGroup
from diptych.domain.plan import NOT_SAMPLED, BlockTables, SequenceStep, StepOutcome, StepPlan
from diptych.domain.ports import MemorySpan
from diptych.domain.sampling import uniform
from diptych.engine import memory
from diptych.engine.plan_check import check_plan, check_tables

EOS = 256
VOCAB_SIZE = 257
LAYOUT = KvLayout(
    model="toy",
    model_digest=xxhash.xxh3_128_digest(b"diptych toy 1"),
    groups=(LayerGroup(GroupKind.FULL, num_layers=1, num_kv_heads=1, head_size=4),),
    dtype=KvDtype.UINT8,
)

_GARBAGE = 0xEE
_POLLS_PER_STEP = 4
_SMILEY = (0xF0, 0x9F, 0x98)
"""U+1F600 to U+1F63F begin so; the fourth byte is 0x80 to 0xBF."""
_LETTERS = b"eeeeettttaaaooiinnsshhrrdlcumwfgypbvk      .,!?ETA0123456789"

Records = npt.NDArray[np.uint8]  # [positions, 4]


class ToyRunner:
    """A `Runner` without weights.

    `step_delay_s` is how long a step takes, waited out in four pieces by `sleep`; `stop` is polled between.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 8,
        block_tokens: int = 4,
        max_context: int = 4096,
        step_delay_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.layout = LAYOUT
        self.vocab_size = VOCAB_SIZE
        self.max_context = max_context
        self.block_tokens = block_tokens
        self.num_blocks = (num_blocks,)
        self._keys: Records = np.full((num_blocks * block_tokens, 4), _GARBAGE, np.uint8)
        self._checks: Records = np.full((num_blocks * block_tokens, 4), _GARBAGE, np.uint8)
        self._step_delay_s = step_delay_s
        self._sleep = sleep

    def run(self, plan: StepPlan, stop: Callable[[], bool] | None = None) -> StepOutcome:
        """One step. Raises Internal when the plan breaks the rules of `check_plan`."""
        check_plan(plan, self.num_blocks, self.block_tokens, self.vocab_size, self.max_context)
        for step in plan.steps:
            self._write(step)
        for _ in range(_POLLS_PER_STEP):
            if stop is not None and stop():
                self._spoil(plan)
                return StepOutcome((NOT_SAMPLED,) * len(plan.steps), aborted=True)
            if self._step_delay_s:
                self._sleep(self._step_delay_s / _POLLS_PER_STEP)
        return StepOutcome(tuple(self._draw(step) for step in plan.steps))

    def pack(self, tables: BlockTables, start: int, num_tokens: int, out: MemorySpan) -> bytes:
        """See `Runner.pack`. Raises ValueError when `out` has not exactly the size of the chunk."""
        wire, slots = self._wire(tables, start, num_tokens, out)
        wire[0] = self._keys[slots]
        wire[1] = self._checks[slots]
        return memory.digest(out)

    def digest(self, data: MemorySpan) -> bytes:
        """16-byte XXH3-128 of `data`."""
        return memory.digest(data)

    def unpack(self, data: MemorySpan, tables: BlockTables, start: int, num_tokens: int) -> None:
        """See `Runner.unpack`. Raises ValueError when `data` has not exactly the size of the chunk."""
        wire, slots = self._wire(tables, start, num_tokens, data)
        self._keys[slots] = wire[0]
        self._checks[slots] = wire[1]

    def _wire(
        self, tables: BlockTables, start: int, num_tokens: int, span: MemorySpan
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The span as [2, num_tokens, 4], and the slots that these positions have in the pool."""
        expected = self.layout.chunk_bytes(num_tokens)
        if span.num_bytes != expected:
            raise ValueError(f"{num_tokens} tokens are {expected} bytes, the span has {span.num_bytes}")
        check_tables(tables, start + num_tokens, self.num_blocks, self.block_tokens)
        wire = np.frombuffer(span.view(), np.uint8).reshape(2, num_tokens, 4)
        return wire, self._slots(tables[0], start, start + num_tokens)

    def _slots(self, table: Sequence[BlockId], start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        blocks = np.asarray(table, np.int64)
        return blocks[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens

    def _write(self, step: SequenceStep) -> None:
        """Writes the records of the step's tokens; the check goes on from what the pool holds before them."""
        end = step.start + len(step.tokens)
        slots = self._slots(step.tables[0], step.start, end)
        check = 0
        if step.start:
            before = self._slots(step.tables[0], step.start - 1, step.start)
            check = int(self._checks[before].view("<u4").item())
        keys = np.asarray(step.tokens, "<u4") | (np.arange(step.start, end).astype("<u4") << 9)
        checks = np.empty(len(step.tokens), "<u4")
        for i, key in enumerate(keys.tolist()):
            check = ((check ^ key) * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
            checks[i] = check
        self._keys[slots] = keys.view(np.uint8).reshape(-1, 4)
        self._checks[slots] = checks.view(np.uint8).reshape(-1, 4)

    def _spoil(self, plan: StepPlan) -> None:
        for step in plan.steps:
            slots = self._slots(step.tables[0], step.start, step.start + len(step.tokens))
            self._keys[slots] = _GARBAGE
            self._checks[slots] = _GARBAGE

    def _draw(self, step: SequenceStep) -> int:
        if step.sample is None:
            return NOT_SAMPLED
        end = step.start + len(step.tokens)
        slots = self._slots(step.tables[0], 0, end)
        keys = np.ascontiguousarray(self._keys[slots])
        state = xxhash.xxh3_64(keys.tobytes())
        state.update(self._checks[slots].tobytes())
        if step.sample.temperature > 0.0:
            draw = int(uniform(step.sample.seed, 0, end) * 2.0**53)
            state.update(draw.to_bytes(8, "little"))
        tail = (keys[-3:].reshape(-1).view("<u4") & 0x1FF).tolist()
        return _allowed(state.intdigest(), tail, step.banned)


def _allowed(state: int, tail: list[int], banned: tuple[int, ...]) -> int:
    """The token of this hash, or of the next hashes, that is not banned. Raises Internal when all are."""
    for _ in range(VOCAB_SIZE):
        token = _token(state, tail)
        if token not in banned:
            return token
        state = xxhash.xxh3_64_intdigest(state.to_bytes(8, "little"))
    for token in range(VOCAB_SIZE):
        if token not in banned:
            return token
    raise Internal("every token is banned")


def _token(state: int, tail: list[int]) -> int:
    """The token that follows, from 64 bits of hash and the last three tokens."""
    for begun in (3, 2, 1):
        if tuple(tail[-begun:]) == _SMILEY[:begun]:
            return _SMILEY[begun] if begun < 3 else 0x80 + state % 64
    if state % 64 == 0:
        return EOS
    if state // 64 % 32 == 0:
        return _SMILEY[0]
    return _LETTERS[state // 2048 % len(_LETTERS)]
