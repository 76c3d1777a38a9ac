"""Our scheduler and runner on paged or on contiguous memory of the same size.

`python -m bench.drivers.batch MODEL THREADS NUM_BLOCKS`
"""

from __future__ import annotations

import sys

from bench.closed_loop import ClosedLoop, pools_of
from bench.drivers.bare import Bare
from bench.serve import Op, serve
from diptych.engine.open import open_runner
from diptych.engine.settings import EngineSettings


def _open() -> tuple[dict[str, object], dict[str, Op]]:
    model, threads, num_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    runner = open_runner(EngineSettings(model, threads=threads, num_blocks=num_blocks))

    def point(allocator: str, batch: int, num_warm: int, num_steps: int, seed: int) -> dict[str, float]:
        pools = pools_of(allocator, num_blocks, runner.block_tokens)
        return ClosedLoop(runner, pools, batch, seed).run(num_warm, num_steps)

    return {}, {"point": point, "decode": Bare(runner).decode}


if __name__ == "__main__":
    serve(_open)
