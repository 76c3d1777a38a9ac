"""Fixtures of the contract suites."""

from tests.support.valkey import redis, shard, store_server, valkey

__all__ = ["redis", "shard", "store_server", "valkey"]
