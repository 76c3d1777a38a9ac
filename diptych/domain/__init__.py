"""The pure core: ids, layouts, blocks, request lifecycle, sampling, plans, errors and the Protocols.

Nothing here does I/O, reads a clock, draws a random number or imports another of our rooms.
"""
