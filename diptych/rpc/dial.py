"""One channel to each peer, for as long as the process talks to it.

A channel multiplexes every call to its address and reconnects by itself, so there is never a reason for two.
One that is no longer needed (its worker left the registry) is dropped with `forget`, so that nothing grows
with the number of peers ever seen.

A call belongs to who made it, and that is who cancels it: closing a channel refuses new calls, but leaves a
stream that is open, and its reader waiting (grpc/grpc#32005).
"""

from types import TracebackType
from typing import Self

import grpc

from diptych.rpc.options import dialling_options
from diptych.rpc.tls import TlsSettings


class Dialer:
    """Channels by address. Belongs to one event loop; `close` it there."""

    def __init__(self, tls: TlsSettings | None = None) -> None:
        """Raises `InvalidField` where the certificates cannot be used."""
        self._credentials = tls.channel_credentials() if tls else None
        self._options = dialling_options()
        if tls and tls.server_name:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (`host:port`). Connects at its first call, not here."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        return channel

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        return grpc.aio.secure_channel(address, self._credentials, options=self._options)

    async def forget(self, address: str) -> None:
        """Close the channel to a peer that is gone, its calls having ended. An unknown address is fine."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        """Close every channel. The dialler may be used again afterwards."""
        for address in list(self._channels):
            await self.forget(address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
