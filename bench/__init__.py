"""Benchmarks: every figure that the documents name, measured beside what it is compared with.

python -m bench --quick            all of them, about a minute each
python -m bench.engine --json F    one of them, in full
python -m bench.peers              builds what it is compared with (`make peers`)
"""
