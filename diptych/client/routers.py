"""The blocking side of a client's channels: one to each router, and calls on the one that answers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from diptych.client.addresses import Addresses
from diptych.domain.errors import DiptychError, Draining, PeerLost
from diptych.rpc.options import dialling_options
from diptych.rpc.status import domain_errors
from diptych.rpc.tls import TlsSettings
from diptych.v1 import router_pb2
from diptych.v1.router_pb2_grpc import RouterStub

T = TypeVar("T")
if TYPE_CHECKING:
    Call = grpc.CallIterator[router_pb2.GenerateResponse]

CONNECT_S: Final = 1.5
"""How long one of several routers may take to be reached."""


class Routers:
    """Safe to share between threads."""

    def __init__(self, given: str | Sequence[str], tls: TlsSettings | None) -> None:
        self.addresses = Addresses(given)
        self.closed = False
        self._channels = {address: _open_channel(address, tls) for address in self.addresses.all}
        self._stubs = {address: RouterStub(channel) for address, channel in self._channels.items()}

    def generate(self, request: router_pb2.GenerateRequest, timeout_s: float) -> tuple[str, Call]:
        """Begins a stream, at the first router that can be reached, and says at which."""
        for _ in range(len(self.addresses) - 1):
            address = self.addresses.current
            if _is_reachable(self._channels[address]):
                break
            self.addresses.leave(address)
        address = self.addresses.current
        return address, self._stubs[address].Generate(request, timeout=timeout_s)

    def attach(self, request: router_pb2.AttachRequest, timeout_s: float) -> tuple[str, Call]:
        """Goes on with a stream at the router that is spoken to now."""
        address = self.addresses.current
        return address, self._stubs[address].Attach(request, timeout=timeout_s)

    def ask(self, question: Callable[[RouterStub], T]) -> T:
        """The first answer. Raises what the last of them raises, or the first whose word is final."""
        for address in self.addresses.in_turn()[:-1]:
            try:
                with domain_errors():
                    return question(self._stubs[address])
            except (PeerLost, Draining):
                self.addresses.leave(address)
        with domain_errors():
            return question(self._stubs[self.addresses.current])

    def ask_all(self, question: Callable[[RouterStub], bool]) -> bool:
        """Whether one says yes. Raises the last error where none does and not all answered."""
        failure: DiptychError | None = None
        for address in self.addresses.in_turn():
            try:
                with domain_errors():
                    if question(self._stubs[address]):
                        return True
            except (PeerLost, Draining) as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    def close(self) -> None:
        """Ends every call. Idempotent."""
        self.closed = True
        for channel in self._channels.values():
            channel.close()


def _open_channel(address: str, tls: TlsSettings | None) -> grpc.Channel:
    options = dialling_options()
    if tls is None:
        return grpc.insecure_channel(address, options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(address, tls.channel_credentials(), options)


def _is_reachable(channel: grpc.Channel) -> bool:
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    told = states.put
    channel.subscribe(told, try_to_connect=True)
    try:
        while True:
            match states.get(timeout=CONNECT_S):
                case grpc.ChannelConnectivity.READY:
                    return True
                case grpc.ChannelConnectivity.TRANSIENT_FAILURE | grpc.ChannelConnectivity.SHUTDOWN:
                    return False
    except queue.Empty:
        return False
    finally:
        channel.unsubscribe(told)
