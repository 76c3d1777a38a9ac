"""What prefill and decode workers have in common: settings, and the way from start to drained.

A worker is two processes; this is the I/O side of it. The engine side's common part is `diptych.engine.host`.
"""
