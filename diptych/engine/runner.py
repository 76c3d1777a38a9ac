"""The runner of real models: weights, pool and sampler behind the `Runner` protocol.

In profile "exact" the logits of a position depend on its prefix alone, to the bit, whatever the batch, the
chunks, the blocks, or a hop between workers; see `diptych.engine.forms`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diptych.domain.errors import InvalidField
from diptych.domain.ids import BlockId, RequestId
from diptych.domain.layout import GroupKind, KvDtype, KvLayout, LayerGroup
from diptych.domain.plan import NOT_SAMPLED, BlockTables, SequenceStep, StepOutcome, StepPlan
from diptych.domain.ports import MemorySpan
from diptych.domain.sampling import SamplingParams
from diptych.engine import huge_pages
from diptych.engine.attention import Attention
from diptych.engine.batch import build_batch
from diptych.engine.config import ModelConfig, read_config
from diptych.engine.fits import Need, available_bytes, fitted_blocks
from diptych.engine.forms import computation as computation_of
from diptych.engine.forms import few_row_limit, kv_dtype
from diptych.engine.llama import Llama
from diptych.engine.plan_check import check_plan
from diptych.engine.pool import KvPool
from diptych.engine.sampler import Draw, sample
from diptych.engine.settings import EngineSettings
from diptych.engine.weight_source import RandomWeights, WeightSource
from diptych.engine.weights import HEAD, num_parameters, shapes_of

if TYPE_CHECKING:  # importing it takes numba
    from diptych.engine.few_rows import FewRows

_WARM_ROWS = 64
"""Enough for what is compiled for many rows."""


class TorchRunner:
    """A `Runner` over a model and a pool that belong together."""

    def __init__(
        self, model: Llama, pool: KvPool, attention: Attention, few_rows: FewRows | None = None
    ) -> None:
        self.layout = pool.layout
        self.vocab_size = model.config.vocab_size
        self.max_context = model.max_context
        self.block_tokens = pool.block_tokens
        self.num_blocks = pool.num_blocks
        self._model = model
        self._pool = pool
        self._attention = attention
        self._few_rows = few_rows

    @torch.inference_mode()
    def run(self, plan: StepPlan, stop: Callable[[], bool] | None = None) -> StepOutcome:
        """One step. Raises Internal when the plan breaks the rules of `check_plan`."""
        logits = self.logits(plan, stop)
        tokens = [NOT_SAMPLED] * len(plan.steps)
        if logits is None:
            return StepOutcome(tokens, aborted=True)
        draws = {
            index: Draw(step.sample, step.start + len(step.tokens), step.banned)
            for index, step in enumerate(plan.steps)
            if step.sample is not None
        }
        for index, token in zip(draws, sample(logits, list(draws.values())), strict=True):
            tokens[index] = token
        return StepOutcome(tokens)

    @torch.inference_mode()
    def logits(self, plan: StepPlan, stop: Callable[[], bool] | None = None) -> Tensor | None:
        """Runs the plan without drawing: logits of the steps that sample, in their order, fp32 [steps,
        vocab].

        None when `stop` ended it. Raises Internal when the plan breaks the rules of `check_plan`.
        """
        check_plan(plan, self.num_blocks, self.block_tokens, self.vocab_size, self.max_context)
        if not plan.steps:
            return torch.empty(0, self.vocab_size)
        pool = self._pool.groups[0]
        batch = build_batch(plan, pool, self._model.form.row_tile or 1, self._pool.device)
        if self._few_rows is not None and stop is None and self._few_rows.serves(batch):
            return self._few_rows.logits(batch)
        attend = self._attention(batch.pieces, self._pool.device)
        return self._model.forward(batch, pool, attend, stop)

    def warm_up(self) -> None:
        """Runs steps of the kinds that requests will bring, so that no request waits for a compiler.

        Writes to the first blocks: call it before anyone owns one.
        """
        many = min(_WARM_ROWS, self.num_blocks[0] * self.block_tokens, self.max_context - 1)
        blocks = (tuple(BlockId(i) for i in range(-(-many // self.block_tokens))),)
        for num_tokens in (many, min(2, many), 1):
            step = SequenceStep(
                RequestId("warm-up"), [0] * num_tokens, 0, blocks, SamplingParams(max_tokens=1)
            )
            self.run(StepPlan((step,)))

    @torch.inference_mode()
    def pack(self, tables: BlockTables, start: int, num_tokens: int, out: MemorySpan) -> bytes:
        """See `Runner.pack`."""
        return self._pool.pack(tables, start, num_tokens, out)

    @torch.inference_mode()
    def unpack(self, data: MemorySpan, tables: BlockTables, start: int, num_tokens: int) -> None:
        """See `Runner.unpack`."""
        self._pool.unpack(data, tables, start, num_tokens)

    def digest(self, data: MemorySpan) -> bytes:
        """See `Runner.digest`."""
        return self._pool.digest(data)


def open_torch_runner(settings: EngineSettings) -> TorchRunner:
    """See `diptych.engine.open.open_runner`."""
    directory = Path(settings.model_path)
    config = read_config(directory)
    max_context = settings.max_context or config.max_positions
    if max_context > config.max_positions:
        raise InvalidField("max_context", f"the model has {config.max_positions} positions, is {max_context}")
    torch.set_num_threads(settings.threads)
    dtype = kv_dtype(settings.profile)
    computation = computation_of(settings, config)
    limit = few_row_limit(settings, config)
    need = _need(settings, config, dtype, limit > 0)
    layout = _layout(directory.name, b"", config, dtype)
    num_blocks = fitted_blocks(
        need, layout, settings.block_tokens, max_context, available_bytes(settings.device)
    )
    if settings.device == "cpu":
        huge_pages.reserve(need.weight_bytes)
    with closing(_weight_source(settings, directory, config)) as source:
        model = Llama(config, source, computation.form, max_context)
        layout = replace(layout, model_digest=source.digest)
        pool = KvPool(layout, (num_blocks,), settings.block_tokens, settings.device)
        few_rows = _few_rows(model, source, pool, settings, limit) if limit else None
    runner = TorchRunner(model, pool, computation.attention, few_rows)
    runner.warm_up()
    return runner


def _weight_source(settings: EngineSettings, directory: Path, config: ModelConfig) -> WeightSource:
    shapes = shapes_of(config)
    if settings.random_weights_seed is not None:
        return RandomWeights(config, shapes, settings.random_weights_seed)
    # Here, so that a machine without weights needs no packages to read them.
    from diptych.engine.weight_files import WeightFiles

    # A tied model's file may carry the head as a copy of the embeddings; we use the embeddings.
    return WeightFiles(directory, shapes, frozenset({HEAD}))


def _layout(name: str, digest: bytes, config: ModelConfig, dtype: KvDtype) -> KvLayout:
    group = LayerGroup(GroupKind.FULL, config.num_layers, config.num_kv_heads, config.head_size)
    return KvLayout(name, digest, (group,), dtype)


def _few_rows(
    model: Llama, source: WeightSource, pool: KvPool, settings: EngineSettings, limit: int
) -> FewRows:
    from diptych.engine.few_rows import FewRows

    return FewRows(model, source, pool.groups[0], settings.threads, limit)


def _need(settings: EngineSettings, config: ModelConfig, dtype: KvDtype, has_few_rows: bool) -> Need:
    # The head is counted apart from the embeddings: packed, it is a copy even where the two are tied.
    parameters = num_parameters(config) + config.vocab_size * config.hidden_size * config.tied_embeddings
    weight_bytes = parameters * dtype.itemsize
    if has_few_rows:
        from diptych.engine.few_rows import num_bytes

        weight_bytes += num_bytes(config)
    return Need(weight_bytes, settings.num_blocks, settings.memory_bytes)
