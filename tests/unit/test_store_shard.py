"""What a call does when the connection breaks or the server knows our functions no more."""

from collections.abc import Iterator

import pytest

from diptych.domain.errors import StoreUnavailable
from diptych.store.connect import client
from diptych.store.library import Library
from diptych.store.shard import MAX_TRIES, Reply, Shard
from tests.support.pretender import Pretender, pretender

__all__ = ["pretender"]

LIBRARY = Library("toy", "_1", "#!lua name=toy")
NOT_FOUND = b"-ERR Function not found\r\n"
OK = b"+OK\r\n"


class Script:
    """Answers FCALLs one after the other, then with the last for ever; everything else with OK."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers: Iterator[bytes | None] = iter(answers)
        self._last = answers[-1]
        self.num_calls = 0
        self.num_loads = 0

    def __call__(self, command: bytes) -> bytes | None:
        self.num_loads += b"FUNCTION" in command
        if b"FCALL" not in command:
            return OK
        self.num_calls += 1
        return next(self._answers, self._last)


async def call(pretender: Pretender, script: Script, *, repeat: bool = True) -> Reply:
    redis = client(await pretender(script))
    try:
        return await Shard(redis, "s").call(LIBRARY, "verb", ["k"], [1], repeat=repeat)
    finally:
        await redis.aclose()


async def test_a_call_is_repeated_after_a_broken_connection(pretender: Pretender) -> None:
    script = Script(None, None, b":7\r\n")
    assert await call(pretender, script) == 7
    assert script.num_calls == 3


async def test_it_is_not_repeated_for_ever(pretender: Pretender) -> None:
    script = Script(None)
    with pytest.raises(StoreUnavailable):
        await call(pretender, script)
    assert script.num_calls == MAX_TRIES


async def test_what_must_not_happen_twice_is_not_repeated(pretender: Pretender) -> None:
    script = Script(None, b":7\r\n")
    with pytest.raises(StoreUnavailable):
        await call(pretender, script, repeat=False)
    assert script.num_calls == 1


async def test_a_lost_library_is_loaded_and_the_call_repeated_once(pretender: Pretender) -> None:
    script = Script(NOT_FOUND, b":7\r\n")
    assert await call(pretender, script, repeat=False) == 7
    assert (script.num_calls, script.num_loads) == (2, 1)

    never = Script(NOT_FOUND)
    with pytest.raises(StoreUnavailable, match="Function not found"):
        await call(pretender, never)
    assert (never.num_calls, never.num_loads) == (2, 1)


@pytest.mark.parametrize(
    "refusal",
    [b"-OOM memory", b"-NOPERM no", b"-ERR any", b"-MISCONF disk", b"-CLUSTERDOWN down", b"-NOAUTH who"],
)
async def test_a_refusal_is_final(pretender: Pretender, refusal: bytes) -> None:
    script = Script(refusal + b"\r\n")
    with pytest.raises(StoreUnavailable, match="diptych_toy_verb_1"):
        await call(pretender, script)
    assert script.num_calls == 1


async def test_a_loading_server_is_asked_again(pretender: Pretender) -> None:
    script = Script(b"-LOADING Redis is loading the dataset in memory\r\n", b":7\r\n")
    assert await call(pretender, script) == 7


@pytest.mark.parametrize("name", ["registry", "bus", "requests", "directory"])
def test_libraries_are_named_by_their_content(name: str) -> None:
    library = Library.read(name)
    assert library.source.startswith(f"#!lua name=diptych_{name}{library.version}\n")
    assert "__VERSION__" not in library.source
    assert f"{library.function('x').rpartition('x')[0]}" in library.source
