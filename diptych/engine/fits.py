"""Whether a model and its KV pool fit into memory, worked out before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from diptych.domain.errors import TooLarge
from diptych.domain.layout import KvLayout

DEFAULT_CONTEXTS = 4
"""Full contexts that the pool holds when neither blocks nor bytes are given and memory allows."""
_ACTIVATION_BYTES = 256 << 20
"""Left free for one step's activations."""
_MIB = 1 << 20
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 of control groups writes "no limit" as a number that no machine has."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of weights, and how large a pool is wished for. All None: `DEFAULT_CONTEXTS` contexts."""

    weight_bytes: int
    num_blocks: int | None
    pool_bytes: int | None


def available_bytes(device: str) -> int:
    """Bytes that may still be taken: of the device's memory, or of the host's or the container's."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    container = _container_bytes(_CONTROL_GROUP)
    free = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    return free if container is None else min(free, container)


def fitted_blocks(need: Need, layout: KvLayout, block_tokens: int, max_context: int, available: int) -> int:
    """Blocks of the pool. Raises TooLarge, showing the sum, when more than `available` bytes are needed."""
    block_bytes = layout.token_bytes * block_tokens
    num_blocks = need.num_blocks
    if need.pool_bytes is not None:
        num_blocks = need.pool_bytes // block_bytes
    if num_blocks is None:
        context_blocks = -(-max_context // block_tokens)
        room = available - need.weight_bytes - _ACTIVATION_BYTES
        # Half of what is left, because a machine has more to do, and at least one full context.
        num_blocks = max(context_blocks, min(DEFAULT_CONTEXTS * context_blocks, room // 2 // block_bytes))
    if num_blocks < 1:
        raise TooLarge(f"a KV pool of {need.pool_bytes} bytes holds no block, one takes {block_bytes}")
    pool_bytes = num_blocks * block_bytes
    total = need.weight_bytes + pool_bytes + _ACTIVATION_BYTES
    if total > available:
        raise TooLarge(
            f"{layout.model} needs {total // _MIB} MiB: weights {need.weight_bytes // _MIB}, KV pool "
            f"{pool_bytes // _MIB} ({num_blocks} blocks of {block_tokens} tokens), activations "
            f"{_ACTIVATION_BYTES // _MIB}; available: {available // _MIB} MiB"
            f"{_advice(need, layout, block_tokens, available)}"
        )
    return num_blocks


def _advice(need: Need, layout: KvLayout, block_tokens: int, available: int) -> str:
    """What would fit."""
    room = available - need.weight_bytes - _ACTIVATION_BYTES
    num_blocks = room // (layout.token_bytes * block_tokens)
    if num_blocks < 1:
        return "; a smaller model is needed, or more memory"
    return (
        f"; {num_blocks} blocks would fit ({num_blocks * block_tokens} tokens: --num-blocks, --max-context)"
    )


def _container_bytes(group: Path) -> int | None:
    """What the container's limit leaves, by version 2 of control groups or by version 1; None without a
    limit. File cache that can be dropped counts as free."""
    old = group / "memory"
    files = (
        (group / "memory.max", group / "memory.current", group / "memory.stat", "inactive_file"),
        (old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat",
         "total_inactive_file"),
    )  # fmt: skip
    for limit_file, used_file, stat_file, droppable_name in files:
        try:
            limit = limit_file.read_text(encoding="ascii").strip()
            used = int(used_file.read_text(encoding="ascii"))
            droppable = _field(stat_file, droppable_name)
        except OSError:
            continue
        return int(limit) - used + droppable if limit.isdigit() and int(limit) < _NO_LIMIT else None
    return None


def _field(path: Path, name: str) -> int:
    """The number after `name` in a file of lines "name number". Raises OSError when there is none."""
    for line in path.read_text(encoding="ascii").splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise OSError(f"{path} has no {name}")
