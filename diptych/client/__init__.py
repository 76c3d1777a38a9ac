"""The Python client: `Client` for threads, `AsyncClient` for an event loop, over the router's gRPC service.

    with Client("127.0.0.1:7400") as client:
        for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="", flush=True)

Every failure is raised as an error of `diptych.domain.errors`, whichever side it comes from.
"""

from diptych.client.aio import AsyncClient, AsyncGeneration
from diptych.client.sync import Client, Generation
from diptych.client.values import Finish, ModelInfo, Piece, RouterStatus, Trail, WorkerInfo

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Client",
    "Finish",
    "Generation",
    "ModelInfo",
    "Piece",
    "RouterStatus",
    "Trail",
    "WorkerInfo",
]
