"""`python -m bench [--quick] [--json FILE] [NAME …]`: runs benchmarks one after the other; all by default."""

from __future__ import annotations

import sys
from importlib import import_module

from bench.harness import Measure, read_options, run

BENCHMARKS = ("engine", "batch", "failover", "divergence")


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 when nothing could be measured."""
    chosen = [name for name in arguments if name in BENCHMARKS]
    options = read_options([a for a in arguments if a not in BENCHMARKS], "python -m bench", __doc__ or "")
    measures: dict[str, Measure] = {
        name: import_module(f"bench.{name}").measure for name in chosen or BENCHMARKS
    }
    return run(measures, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
