"""The serving side of the gRPC channel: registered regions, in bounded parts, to whoever knows their key.

Synchronous and threaded, since it lives in the engine process, which has no event loop. A thread serves one
read; between two parts it waits, without the GIL, until the reader has taken the last one, so that a read
holds one part in memory whatever its length. Nothing is allocated by a number that a peer sent. A reader
that stops reading is ended by its own deadline (a read without one is refused) or by keepalive.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.message import DecodeError

from diptych.domain.errors import InvalidField
from diptych.domain.layout import WIRE_VERSION
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.grpc_wire import PART_BYTES, SERVER_OPTIONS, SERVICE
from diptych.transfer.parts import encode_part
from diptych.transfer.reads import MAX_DEADLINE_S
from diptych.transfer.regions import OutsideRegion, Regions, UnknownRegion
from diptych.v1.kv_pb2 import KvReadRequest

NUM_THREADS = 8
MAX_WAITING_READS = 256
_CLOCK_SLACK_S = 5.0


class RegionServer:
    """Serves `regions` at `host:port` (0: a free port) from construction until `close`."""

    def __init__(self, regions: Regions, host: str, port: int, tls: ChannelTls | None) -> None:
        """Raises InvalidField when the address can't be listened on."""
        self._regions = regions
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-serve")
        read = grpc.unary_stream_rpc_method_handler(self._read)  # bytes in, bytes out
        self._server = grpc.server(
            self._threads,
            handlers=[grpc.method_handlers_generic_handler(SERVICE, {"Read": read})],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_WAITING_READS,
        )
        target = f"{host}:{port}"
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(target)
            else:
                self.port = self._server.add_secure_port(target, tls.server)
        except RuntimeError as failure:
            problem = f"can't listen on {target}: the port is taken or the address is not this machine's"
            raise InvalidField("kv port", problem) from failure
        self._server.start()

    def close(self) -> None:
        """Ends every read and waits for its thread. Idempotent."""
        self._server.stop(grace=None).wait()
        self._threads.shutdown(wait=True)

    def _read(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = self._checked(message, context)
        try:
            self._regions.check(request.region_key, request.offset, request.num_bytes)
            for offset in range(0, request.num_bytes, PART_BYTES):
                size = min(PART_BYTES, request.num_bytes - offset)
                with self._regions.borrow(request.region_key, request.offset + offset, size) as data:
                    part = encode_part(offset, data)
                yield part
        except UnknownRegion as problem:
            context.abort(grpc.StatusCode.NOT_FOUND, str(problem))
        except OutsideRegion as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))

    def _checked(self, message: bytes, context: grpc.ServicerContext) -> KvReadRequest:
        try:
            request = KvReadRequest.FromString(message)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not a KvReadRequest")
        if request.wire_version != WIRE_VERSION:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"wire version {request.wire_version} was asked for, this side speaks {WIRE_VERSION}",
            )
        if context.time_remaining() > MAX_DEADLINE_S + _CLOCK_SLACK_S:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"a read needs a deadline of at most {MAX_DEADLINE_S:g} s"
            )
        return request
