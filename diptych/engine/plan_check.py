"""What must hold of a plan before a runner runs it: a scheduler's mistake must not become wrong KV."""

from __future__ import annotations

from diptych.domain.errors import Internal
from diptych.domain.ids import BlockId
from diptych.domain.plan import BlockTables, SequenceStep, StepPlan


def check_plan(
    plan: StepPlan, num_blocks: tuple[int, ...], block_tokens: int, vocab_size: int, max_context: int
) -> None:
    """Raises Internal when a step is empty, leaves the vocabulary, the context, its tables or the pool, or
    when two steps would write to one block."""
    written: set[tuple[int, BlockId]] = set()
    for step in plan.steps:
        end = step.start + len(step.tokens)
        if not step.tokens or step.start < 0:
            raise Internal(f"{step.request_id}: {len(step.tokens)} tokens from position {step.start}")
        if end > max_context:
            raise Internal(f"{step.request_id}: {end} positions, the context holds {max_context}")
        if min(step.tokens) < 0 or max(step.tokens) >= vocab_size:
            raise Internal(f"{step.request_id}: a token id outside of 0 to {vocab_size - 1}")
        check_tables(step.tables, end, num_blocks, block_tokens)
        _claim(step, written, block_tokens)


def check_tables(
    tables: BlockTables, num_tokens: int, num_blocks: tuple[int, ...], block_tokens: int
) -> None:
    """Raises Internal when the tables do not cover `num_tokens` positions with blocks of the pools."""
    if len(tables) != len(num_blocks):
        raise Internal(f"{len(tables)} block tables for {len(num_blocks)} layer groups")
    needed = -(-num_tokens // block_tokens)
    for table, size in zip(tables, num_blocks, strict=True):
        if len(table) < needed:
            raise Internal(f"a table of {len(table)} blocks for {num_tokens} tokens, which need {needed}")
        used = table[:needed]
        if used and (min(used) < 0 or max(used) >= size):
            raise Internal(f"a block outside of 0 to {size - 1}")


def _claim(step: SequenceStep, written: set[tuple[int, BlockId]], block_tokens: int) -> None:
    """Notes the blocks that this step writes to, and refuses one that another step of the plan has."""
    first = step.start // block_tokens
    last = (step.start + len(step.tokens) - 1) // block_tokens
    for group, table in enumerate(step.tables):
        for block in table[first : last + 1]:
            if (group, block) in written:
                raise Internal(f"{step.request_id}: block {block} is written twice in one step")
            written.add((group, block))
