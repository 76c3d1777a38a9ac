"""A running system in which a test kills, stops, fails or holds whoever passes a point of the protocol.

Two routers, two prefill workers, two decode workers, a cache and a store: of each service that keeps requests
there is another one. Router 1 is not one that `up` would start again: this does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from redis import Redis

from diptych.cli.census import Census, Place, take
from diptych.cli.verdict import findings
from diptych.client import Client, Generation
from diptych.domain.errors import DiptychError
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2_grpc import WorkerStub
from tests.support.router_process import Process
from tests.support.running_up import RunningUp, wait_until

PROMPT = [(31 * i + i * i % 17) % 256 for i in range(600)]
NUM_TOKENS = 12
TEMPERATURES = (0.0, 0.9)

ANSWER_S = 60.0
"""Most seconds to the end of an answer: more than ten times what the slowest should take."""
SETTLE_S = 60.0

QUICK = {
    "DIPTYCH_TOY_STEP_DELAY_S": "0.01",
    # What ends by itself, when its owner is gone, ends sooner than the tests lose patience.
    "DIPTYCH_DETACH_GRACE_S": "3",
    "DIPTYCH_LEASE_S": "3",
    "DIPTYCH_MAX_LEASE_S": "3",
    # `up` gives its router one of its own otherwise, that the other would not know.
    "DIPTYCH_SECRET": "a secret of sixteen or more",
}
EVERYBODY = {"router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1", "cache-0"}


@dataclass(slots=True)
class Answer:
    """What a client got."""

    temperature: float
    num_tokens: int = NUM_TOKENS
    """As many as were asked for, or came."""
    tokens: list[int] = field(default_factory=list)
    error: Exception | None = None
    num_reattached: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


class System:
    """Started when entered; `expected` is what undisturbed clients get."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        points = {"DIPTYCH_FAILPOINTS": str(self._armed)}
        self.up = RunningUp(folder, "--prefill", "2", "--decode", "2", **QUICK, **points)
        self.expected: dict[float, list[int]] = {}
        self._num_asked = 0
        self._other: Process | None = None

    def __enter__(self) -> Self:
        self.up.__enter__()
        self._start_other()
        self.expected = {answer.temperature: answer.tokens for answer in self.ask_all("reference")}
        assert all(len(tokens) == NUM_TOKENS for tokens in self.expected.values())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._other is not None:
            self._other.__exit__(kind, error, trace)
        self.up.__exit__(kind, error, trace)

    @property
    def store_url(self) -> str:
        found = re.search(r"^store: ready on (\S+)", self.up.text, re.MULTILINE)
        assert found
        return found.group(1)

    @property
    def routers(self) -> list[str]:
        assert self._other
        return [self.up.router, self._other.address]

    # Failpoints.

    def arm(self, point: str, action: str) -> None:
        """Whoever passes the point next acts."""
        self.disarm()
        draft = self._folder / "draft"
        draft.write_text(f"{point} {action}\n")
        draft.rename(self._armed)

    def withdraw(self) -> None:
        """Nobody acts any more."""
        self._armed.unlink(missing_ok=True)

    def disarm(self) -> None:
        """Nobody acts any more, and nobody is held."""
        for path in self._folder.glob("failpoints*"):
            path.unlink()

    def taken_by(self) -> int | None:
        """The process that acted."""
        found = list(self._folder.glob("failpoints.taken-*"))
        return int(found[0].name.rpartition("-")[2]) if found else None

    @property
    def _armed(self) -> Path:
        return self._folder / "failpoints"

    # Clients.

    def client(self) -> Client:
        """One that knows both routers."""
        return Client(self.routers, timeout_s=ANSWER_S)

    def stream(self, client: Client, temperature: float, salt: str) -> Generation:
        """A request whose prompt no other salt has cached: each step of the way is taken."""
        return client.generate(
            token_ids=PROMPT,
            max_tokens=NUM_TOKENS,
            temperature=temperature,
            seed=5,
            ignore_eos=True,
            cache_salt=salt,
        )

    def ask(self, asked: Answer, salt: str, after_first: Callable[[], None]) -> None:
        """One request, to its end or until it has as many tokens as were asked for. Fails for a gap or a
        repeat."""
        with self.client() as client, self.stream(client, asked.temperature, salt) as stream:
            try:
                for piece in stream:
                    assert not piece.tokens or piece.index == len(asked.tokens)
                    if piece.tokens and not asked.tokens:
                        after_first()
                    asked.tokens.extend(piece.tokens)
                    asked.fallbacks = piece.finish.trail.fallbacks if piece.finish else {}
                    if asked.num_tokens <= len(asked.tokens) < NUM_TOKENS:
                        break
            except DiptychError as error:
                asked.error = error
            asked.num_reattached = stream.num_reattached
        asked.num_tokens = max(asked.num_tokens, len(asked.tokens))

    def ask_all(
        self, salt: str = "", *, num_tokens: int = NUM_TOKENS, after_first: Callable[[], None] = lambda: None
    ) -> list[Answer]:
        """A greedy and a seeded request at the same time; each is given up once it has `num_tokens`."""
        salt = salt or self._new_salt()
        answers = [Answer(temperature, num_tokens) for temperature in TEMPERATURES]
        asking = [
            threading.Thread(target=self.ask, args=(answer, f"{salt} {answer.temperature}", after_first))
            for answer in answers
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(2 * ANSWER_S)
            assert not thread.is_alive(), "a client got neither an answer nor an error"
        return answers

    def fill_cache(self) -> str:
        """A salt whose chunks the cache has, and no worker. Not so where the cache is not known yet."""
        salt, before = self._new_salt(), self._num_chunks()
        for answer in self.ask_all(salt):
            assert answer.tokens == self.expected[answer.temperature]
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self._num_chunks() >= before + 4, "two chunks of each", 3.0)
        for address in self.addresses("prefill", "decode").values():
            with grpc.insecure_channel(address) as channel:
                WorkerStub(channel).DropCache(worker_pb2.DropCacheRequest(), timeout=10)
        return salt

    def kill(self, name: str) -> None:
        """SIGKILL to a child of `up`."""
        send_signal(self.up.pid_of(name), signal.SIGKILL)

    # The state of things.

    def settle(self) -> None:
        """Waits until everybody is there and holds nothing of any request, in the store neither."""
        if self._other is not None and self._other.popen.poll() is not None:
            self._other.__exit__(None, None, None)
            self._start_other()
        last: list[str] = []

        def settled() -> bool:
            last[:] = self._left()
            return not last

        try:
            wait_until(settled, "nothing is left", SETTLE_S)
        except AssertionError:
            raise AssertionError(f"left: {last}\n{self.up.text[-2000:]}") from None

    def addresses(self, *roles: str) -> dict[str, str]:
        with self.client() as client:
            workers = client.status().workers
        return {w.worker_id: w.address for w in workers if w.worker_id.startswith(roles)}

    @contextlib.contextmanager
    def store(self) -> Iterator[Redis]:
        """A connection of our own to the store."""
        redis = Redis.from_url(self.store_url)
        try:
            yield redis
        finally:
            redis.close()

    def _new_salt(self) -> str:
        self._num_asked += 1
        return f"salt {self._num_asked}"

    def _num_chunks(self) -> int:
        with self.store() as redis:
            return sum(1 for _ in redis.scan_iter("diptych:{main}:chunk:*"))

    def _start_other(self) -> None:
        flags = ("--redis-url", self.store_url, "--model", "toy", "--worker-id", "router-1")
        quiet = ("--log-level", "error")  # nobody reads it meanwhile
        self._other = Process("-m", "services.router", *flags, *quiet, env=self.up.env)

    def _left(self) -> list[str]:
        try:
            census = asyncio.run(take(Place("", self.store_url, "main")))
        except DiptychError as error:
            return [f"no census: {error}"]
        return [*_missing(census), *map(str, findings(census)), *_held(census)]


def _missing(census: Census) -> list[str]:
    return sorted(
        f"{name} is missing" for name in EVERYBODY - {member.worker_id for member in census.members}
    )


def _held(census: Census) -> Iterator[str]:
    for member in census.members:
        if member.num_live:
            yield f"{member.worker_id}: {member.num_live} live requests"
        account = member.account
        if account is None:
            continue
        if account.num_running or account.num_waiting or account.slots[0]:
            yield f"{member.worker_id}: {account.num_running} + {account.num_waiting}, {account.slots} slots"
        for held in account.held:
            if held.kind != "last word":
                yield f"{member.worker_id}: {held.kind} {held.name} for {held.owner}, {held.ends_in_s}"
    if census.store is None:
        return
    for state, count in census.store.num_requests.items():
        if state != "ended":
            yield f"store: {count} requests {state}"
    for bus in census.store.buses:
        if bus.num_waiting or bus.num_claims:
            yield f"bus: {bus.num_waiting} waiting, {bus.num_claims} claimed"


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def send_signal(pid: int, number: signal.Signals) -> None:
    """Does nothing where the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
