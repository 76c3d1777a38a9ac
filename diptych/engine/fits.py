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
    free = _meminfo("MemAvailable")
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, limit - used)


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
        )
    return num_blocks


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _number(path: Path) -> int | None:
    """The number in a control group's file; None where there is no such file or no limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
