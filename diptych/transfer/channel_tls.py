"""TLS of the channels that cross a network. The files were read elsewhere (`diptych.rpc.tls`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True)
class ChannelTls:
    """What this process shows to its readers and to those it reads from. On both ways, or on neither."""

    server: grpc.ServerCredentials
    client: grpc.ChannelCredentials
    server_name: str | None = None
    """The name that peers' certificates must bear, where they are dialled by bare address."""
