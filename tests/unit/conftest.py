"""Fixtures that unit tests share."""

from tests.support.rpc_fixtures import dialer, serving

__all__ = ["dialer", "serving"]
