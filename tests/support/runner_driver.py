"""Drives a runner as a scheduler would, for tests: one sequence at a time, or several in one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.domain.ids import BlockId, RequestId
from diptych.domain.plan import BlockTables, SequenceStep, StepOutcome, StepPlan
from diptych.domain.ports import Runner
from diptych.domain.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=1)


@dataclass
class DrivenSequence:
    """A sequence with its blocks: `tokens` known so far, of which `computed` have KV."""

    tokens: list[int]
    tables: BlockTables
    name: str = "r"
    sample: SamplingParams = GREEDY
    computed: int = 0
    output: list[int] = field(default_factory=list)

    def step(self, num_tokens: int | None = None) -> SequenceStep:
        """The next `num_tokens` uncomputed tokens (all by default); samples when they reach the end."""
        end = len(self.tokens) if num_tokens is None else min(self.computed + num_tokens, len(self.tokens))
        return SequenceStep(
            RequestId(self.name),
            self.tokens[self.computed : end],
            self.computed,
            self.tables,
            self.sample if end == len(self.tokens) else None,
        )

    def take(self, step: SequenceStep, token: int) -> None:
        self.computed += len(step.tokens)
        if step.sample is not None:
            self.tokens.append(token)
            self.output.append(token)


def table(blocks: Sequence[int]) -> BlockTables:
    return (tuple(BlockId(block) for block in blocks),)


def advance(runner: Runner, sequences: Sequence[DrivenSequence], chunks: Sequence[int | None]) -> StepOutcome:
    """One step of all sequences together, `chunks[i]` tokens of `sequences[i]`."""
    steps = tuple(sequence.step(chunk) for sequence, chunk in zip(sequences, chunks, strict=True))
    outcome = runner.run(StepPlan(steps))
    for sequence, step, token in zip(sequences, steps, outcome.tokens, strict=True):
        sequence.take(step, token)
    return outcome


def prefill(runner: Runner, sequence: DrivenSequence, chunk: int | None = None) -> None:
    """Runs the prompt in chunks and draws the first token."""
    while not sequence.output:
        advance(runner, [sequence], [chunk])


def decode(runner: Runner, sequence: DrivenSequence, num_tokens: int) -> list[int]:
    """Draws `num_tokens` more tokens, one a step, and returns all output so far."""
    for _ in range(num_tokens):
        advance(runner, [sequence], [None])
    return sequence.output
