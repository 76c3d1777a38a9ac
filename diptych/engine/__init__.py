"""Models and their paged KV: weights, attention, pool, sampler, runner; and the torch-free toy.

Importing this package imports no torch; `diptych.engine.open` does so once a real model is opened.
"""
