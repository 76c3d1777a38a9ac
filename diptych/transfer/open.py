"""Channels by name."""

from __future__ import annotations

from diptych.domain.errors import InvalidField
from diptych.domain.ports import KvChannel
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.memory import MemoryFabric
from diptych.transfer.nixl_library import Transport

KINDS = ("grpc", "memory", "nixl")

PROCESS_FABRIC = MemoryFabric()
"""Connects the memory channels that are opened by name in this process."""


def open_channel(
    kind: str,
    host: str,
    port: int,
    *,
    advertise_host: str | None = None,
    tls: ChannelTls | None = None,
    nixl_transport: Transport = "auto",
) -> KvChannel:
    """A channel of `kind` that peers reach at `host:port` (0: a free port).

    `advertise_host` is what peers dial where it differs from `host`; it and `tls` are for channels that cross
    a network. Raises InvalidField for an unknown kind, one that does not work here or does not encrypt where
    `tls` is given, and for an address that can't be used.
    """
    if kind == "memory":
        return PROCESS_FABRIC.open(host, port)
    if kind == "grpc":
        from diptych.transfer.grpc import GrpcChannel  # only who uses it pays for importing gRPC

        return GrpcChannel(host, port, advertise_host, tls)
    if kind == "nixl":
        if tls is not None:
            raise InvalidField("kv channel", "nixl does not encrypt: with TLS, KV crosses over grpc")
        from diptych.transfer.nixl import NixlChannel

        return NixlChannel(host, port, advertise_host, nixl_transport)
    raise InvalidField("kv channel", f"must be one of {', '.join(KINDS)}, is {kind!r}")
