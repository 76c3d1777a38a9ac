"""The serving side of the NIXL channel: registered memory, and a port that tells how to read it.

    register(memory) ─▶ agent, region's key       Describe(key) ─▶ metadata, address, place

Who knows a region's key is told what NIXL needs to read that region, and nothing else of the process. The
bytes are then fetched without us. The port is gRPC, as all ports of ours; the metadata is protobuf on the
way, and NIXL's own form inside.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.message import DecodeError

from diptych.domain.errors import Draining, InvalidField
from diptych.domain.layout import WIRE_VERSION
from diptych.domain.ports import MemorySpan
from diptych.transfer.grpc_wire import SERVER_OPTIONS
from diptych.transfer.nixl_agent import Agent, Registration
from diptych.transfer.nixl_place import place
from diptych.transfer.reads import Devices
from diptych.transfer.regions import Regions, UnknownRegion
from diptych.v1 import kv_pb2
from diptych.v1.kv_pb2 import KvDescribeRequest, KvDescription

SERVICE = kv_pb2.DESCRIPTOR.services_by_name["KvMemory"].full_name
DESCRIBE_METHOD = f"/{SERVICE}/Describe"

NUM_THREADS = 2
MAX_WAITING = 256


class MemoryServer:
    """Describes registered memory at `host:port` (0: a free one) from construction until `close`."""

    def __init__(self, host: str, port: int, open_agent: Callable[[], Agent], devices: Devices) -> None:
        """The agent is opened with the first memory. Raises InvalidField when the address can't be had."""
        self._open_agent = open_agent
        self._agent: Agent | None = None
        self._regions = Regions(devices)
        self._registered: list[Registration] = []
        self._descriptions: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-describe")
        describe = grpc.unary_unary_rpc_method_handler(self._describe)  # bytes in, bytes out
        self._server = grpc.server(
            self._threads,
            handlers=[grpc.method_handlers_generic_handler(SERVICE, {"Describe": describe})],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_WAITING,
        )
        target = f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(target)
        except RuntimeError as failure:
            problem = f"can't listen on {target}: the port is taken or the address is not this machine's"
            raise InvalidField("kv port", problem) from failure
        self._server.start()

    def add(self, memory: MemorySpan) -> bytes:
        """The key of newly readable memory. ValueError: it can't be read. Draining: closed."""
        with self._lock:
            if self._closed:
                raise Draining("the nixl channel is closed")
            if self._agent is None:
                self._agent = self._open_agent()
            key = self._regions.add(memory)
            registration = self._agent.register(memory)
            self._registered.append(registration)
            self._descriptions[key] = _description(self._agent, registration, memory)
        return key

    def close(self) -> None:
        """Answers no more, lets go of all memory, and hangs up on those who read it. Idempotent."""
        self._regions.close()
        self._server.stop(grace=None).wait()
        self._threads.shutdown(wait=True)
        with self._lock:
            self._closed = True
            if self._agent is None:
                return
            for registration in self._registered:
                self._agent.deregister(registration)
            self._registered.clear()
            self._agent.close()
            self._agent = None

    def _describe(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = self._checked(message, context)
        try:
            self._regions.find(request.region_key)  # in a time that tells nothing about keys
        except UnknownRegion as problem:
            context.abort(grpc.StatusCode.NOT_FOUND, str(problem))
        return self._descriptions[request.region_key]

    def _checked(self, message: bytes, context: grpc.ServicerContext) -> KvDescribeRequest:
        try:
            request = KvDescribeRequest.FromString(message)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not a KvDescribeRequest")
        if request.wire_version != WIRE_VERSION:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"wire version {request.wire_version} was asked for, this side speaks {WIRE_VERSION}",
            )
        return request


def _description(agent: Agent, registration: Registration, memory: MemorySpan) -> bytes:
    return KvDescription(
        agent=agent.name,
        metadata=agent.metadata(registration),
        base=memory.address,
        num_bytes=memory.num_bytes,
        device=memory.device,
        place=place(),
        pid=os.getpid(),
        rdma=agent.uses_rdma,
    ).SerializeToString()
