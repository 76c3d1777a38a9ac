"""A server that speaks just enough RESP to say what a test wants to hear."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

Answer = Callable[[bytes], bytes | None]
Pretender = Callable[[Answer], Awaitable[str]]


@pytest.fixture
async def pretender() -> AsyncIterator[Pretender]:
    """`await pretender(answer)`: the URL of a server that answers each command (RESP bytes) as the function
    says; at None it breaks the connection.
    """
    async with AsyncExitStack() as stack:

        async def start(answer: Answer) -> str:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(1 << 20):
                    for command in re.split(rb"(?=\*\d+\r\n\$)", data)[1:]:
                        reply = answer(command)
                        if reply is None:
                            writer.transport.abort()
                            return
                        writer.write(reply)
                writer.close()

            server = await stack.enter_async_context(await asyncio.start_server(serve, "127.0.0.1", 0))
            return f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        yield start
