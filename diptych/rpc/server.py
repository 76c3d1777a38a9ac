"""A gRPC server from start to stop.

    serve ──▶ SERVING ──drain──▶ NOT_SERVING, new calls refused ──all ended, or grace over──▶ stopped

Draining first tells the health watchers, so that nobody is sent here any more; calls that come all the same
end as `Draining`, which is safe to retry elsewhere; then the calls in flight get their grace, and what is
left is cancelled.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from diptych.domain.errors import InvalidField
from diptych.rpc.interceptors import Boundary
from diptych.rpc.options import serving_options
from diptych.rpc.tls import TlsSettings

Registration = Callable[[grpc.aio.Server], None]
"""Adds one servicer: `partial(add_DecodeServicer_to_server, servicer)`."""

FLUSH_S: Final = 0.5
"""After the last handler has ended: how long its status may take to leave, and a health watch to be
closed."""


async def serve(
    registrations: Sequence[Registration],
    *,
    address: str,
    tls: TlsSettings | None = None,
    serving: bool = True,
) -> RpcServer:
    """Start serving on `address` (`host:port`; port 0 takes a free one), with health and reflection.

    `serving=False` starts as NOT_SERVING: for a process that can answer, but is not ready to (`set_serving`).
    Raises `InvalidField` where the address cannot be had or the certificates cannot be used.
    """
    host, _ = _split(address)
    boundary = Boundary()
    server = grpc.aio.server(interceptors=[boundary], options=serving_options())
    named = _Naming(server)
    for register in registrations:
        register(cast("grpc.aio.Server", named))
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # absent from the type stubs
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        [*named.services, health.SERVICE_NAME, reflection.SERVICE_NAME], cast("grpc.Server", server)
    )
    port = _bind(server, address, tls)
    running = RpcServer(server, boundary, health_servicer, named.services, f"{host}:{port}")
    await running.set_serving(serving)
    await server.start()
    return running


class RpcServer:
    """A started server. Belongs to the event loop that started it; ends with `drain`."""

    def __init__(
        self, server: grpc.aio.Server, boundary: Boundary, health: Any, services: list[str], address: str
    ) -> None:
        self._server = server
        self._boundary = boundary
        self._health = health
        self._services = services
        self.address = address
        """`host:port` as bound: where port 0 was asked for, the port that was free."""

    @property
    def bound_port(self) -> int:
        """The port that is listened on."""
        return int(self.address.rpartition(":")[2])

    @property
    def num_running(self) -> int:
        """Calls in flight, health and reflection aside."""
        return self._boundary.num_running

    async def set_serving(self, serving: bool) -> None:
        """What health answers, for the server as a whole and for each service. No effect once draining."""
        states = health_pb2.HealthCheckResponse
        for service in ("", *self._services):
            await self._health.set(service, states.SERVING if serving else states.NOT_SERVING)

    async def drain(self, grace_s: float) -> bool:
        """Leave in order, within `grace_s` and a moment. Whether every call ended by itself.

        With `grace_s=0` calls in flight are cancelled at once. Safe to call twice; the shorter grace holds.
        """
        await self._health.enter_graceful_shutdown()
        self._boundary.refuse_new()
        idle = await self._boundary.wait_idle(grace_s)
        await self._server.stop(FLUSH_S if idle else None)
        # `stop` returns when gRPC is done with the calls; the handlers it cancelled may still be unwinding.
        await self._boundary.wait_idle(FLUSH_S)
        return idle


class _Naming:
    """Stands in for the server while servicers register, and learns their names for health and reflection."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.services: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler[Any, Any]]) -> None:
        handlers = list(handlers)
        self.services += [h.service_name() for h in handlers if isinstance(h, grpc.ServiceRpcHandler)]
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, methods: object) -> None:
        """A second door of generated code, for servers that look methods up natively; asyncio's does not."""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    # gRPC takes any number and binds it modulo 65,536.
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidField("listen", f"cannot listen on {address}: not host:port, the port at most 65535")
    return host, int(port)


def _bind(server: grpc.aio.Server, address: str, tls: TlsSettings | None) -> int:
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise InvalidField(
            "listen", f"cannot listen on {address}: {_why_unbindable(*_split(address))}"
        ) from error


def _why_unbindable(host: str, port: int) -> str:
    """gRPC only says that it failed; the system says why."""
    try:
        with socket.create_server((host.strip("[]"), port)):
            return "gRPC refused it"
    except OSError as error:
        return error.strerror or str(error)
