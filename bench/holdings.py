"""What the workers of a system hold for one request, asked of the workers themselves.

An answer is taken after the question (`InspectRequest.fresh`): the engine gives it at the end of a turn. So a
worker that answers that it holds nothing held nothing then, and what is measured with it is never too short;
too long it is by one question at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from diptych.domain.audit import Held
from diptych.rpc.dial import Dialer
from diptych.rpc.inspection import Account, read_account
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:  # the name is in the stubs only
    from diptych.v1.worker_pb2_grpc import WorkerAsyncStub

KEPT: Final = frozenset({"last word"})
"""Kinds that are kept on purpose after the end: for a client that may come back, and bounded in time."""
ANSWER_S: Final = 10.0
PAUSE_S: Final = 0.004
"""Between two questions: asking must not take the cores from those who are asked."""


def held_for(account: Account, request_id: str) -> list[Held]:
    """What a worker holds for a request. A chunk that only the cache still reads is the cache's."""
    return [
        held
        for held in account.held
        if (held.name == request_id or held.name.startswith(f"{request_id}/"))
        and held.kind not in KEPT
        and not (held.kind == "chunk" and held.owner == "cache")
    ]


def state_of(held: Iterable[Held], has_token: bool) -> str:
    """How far a request is: "queued", "prefilling", "reading" or "decoding"."""
    kinds = {one.kind for one in held}
    if has_token:
        return "decoding"
    if "read" in kinds:
        return "reading"
    # An attempt has blocks at its prefill worker once it computes.
    computing = any(one.kind == "attempt" and one.num_blocks for one in held)
    return "prefilling" if computing else "queued"


@dataclass(slots=True)
class Settling:
    """How long it took until nobody held anything."""

    seconds: float
    gaps: list[float] = field(default_factory=list)
    """Seconds that each question took: the resolution."""


class Workers:
    """Asks a few workers, all at once. Belongs to one event loop."""

    def __init__(self, dialer: Dialer, addresses: Mapping[str, str]) -> None:
        """`addresses` by name of worker."""
        self._stubs: dict[str, WorkerAsyncStub] = {
            name: WorkerStub(dialer.channel(address)) for name, address in addresses.items()
        }

    async def accounts(self, fresh: bool = True) -> dict[str, Account]:
        """What each of them says of itself."""
        request = worker_pb2.InspectRequest(fresh=fresh)
        answers = await asyncio.gather(
            *(stub.Inspect(request, timeout=ANSWER_S) for stub in self._stubs.values())
        )
        return {name: read_account(answer) for name, answer in zip(self._stubs, answers, strict=True)}

    async def held(self, request_id: str, fresh: bool = True) -> dict[str, list[Held]]:
        """What each of them holds for a request; those that hold nothing are not named."""
        accounts = await self.accounts(fresh)
        held = {name: held_for(account, request_id) for name, account in accounts.items()}
        return {name: things for name, things in held.items() if things}

    async def settle(self, request_id: str, since: float, timeout_s: float) -> Settling:
        """Asks each again and again until none holds anything for the request. Raises TimeoutError."""
        found = Settling(0.0)
        async with asyncio.timeout(timeout_s):
            # Each by itself: one that is busy answers late, and says nothing of the others. Then all of them
            # once more, for one that had nothing may have been given something meanwhile.
            while not found.seconds or await self.held(request_id):
                ends = [self._until_empty(stub, request_id, found.gaps) for stub in self._stubs.values()]
                found.seconds = max(await asyncio.gather(*ends)) - since
        return found

    async def _until_empty(self, stub: WorkerAsyncStub, request_id: str, gaps: list[float]) -> float:
        """When the first answer came that names nothing of the request."""
        request = worker_pb2.InspectRequest(fresh=True)
        while True:
            asked = time.monotonic()
            account = read_account(await stub.Inspect(request, timeout=ANSWER_S))
            now = time.monotonic()
            gaps.append(now - asked)
            if not held_for(account, request_id):
                return now
            await asyncio.sleep(PAUSE_S)
