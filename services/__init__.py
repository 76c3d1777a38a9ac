"""The four processes: router, prefill, decode, cache. None imports another; the library imports none."""
