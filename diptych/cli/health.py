"""`python -m diptych.cli.health HOST:PORT`: whether a service is ready, as an exit status.

Asks the standard gRPC health service for the server as a whole, with the certificates of the service beside
it. Imports as little as it can: a container engine runs it for each container every few seconds.
"""

from __future__ import annotations

import sys
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.cli.certificates import tls_from_environment

TIMEOUT_S: Final = 4.0


def state_of(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """`SERVING`, `NOT_SERVING`, or why there was no answer.

    Raises InvalidField for certificates that can't be used.
    """
    tls = tls_from_environment()
    dialled = (
        grpc.secure_channel(address, tls.channel_credentials()) if tls else grpc.insecure_channel(address)
    )
    with dialled as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"no answer: {error}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: list[str]) -> int:
    """Exit status: 0 ready, 1 not ready, 2 wrong arguments. Prints the state, which the engine keeps."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m diptych.cli.health HOST:PORT\n")
        return 2
    state = state_of(arguments[0])
    print(state)
    return 0 if state == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
