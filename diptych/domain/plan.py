"""Plan, outcome: what a scheduler asks of a runner for one step, and what it gets back.

    plan = scheduler.plan(now)  →  outcome = runner.run(plan)  →  effects = scheduler.commit(plan, outcome)

A plan names sequences with their new tokens and their block tables; a mixed batch of decodes (one token
each) and prefill chunks (many tokens) is ordinary. A plan lends its sequences' lists: they do not change
until `commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.domain.ids import BlockId, RequestId
from diptych.domain.sampling import SamplingParams

NOT_SAMPLED = -1

BlockTables = tuple[Sequence[BlockId], ...]
"""One block table for each layer group; entry `i` holds positions `i * block_tokens` onwards."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a step: run `tokens` at positions `start` onwards and write their KV.

    `tables` cover `start + len(tokens)` positions; KV before `start` is already there. With `sample` the
    token at position `start + len(tokens)` is drawn; without it no logits are computed.
    """

    request_id: RequestId
    tokens: Sequence[int]
    start: int
    tables: BlockTables
    sample: SamplingParams | None
    banned: tuple[int, ...] = ()
    """Ids that may not be drawn, such as the end of sequence before `min_tokens`."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that runs in one step."""

    steps: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(step.tokens) for step in self.steps)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`tokens[i]` is what `plan.steps[i]` drew, NOT_SAMPLED where it asked for none.

    `aborted`: the runner was told to stop between two layers; nothing was drawn and the KV of the step's
    tokens is undefined (their blocks still belong to their requests).
    """

    tokens: Sequence[int]
    aborted: bool = False
