"""5,000 requests, three in ten given up at any moment: no process is fuller at the end than in the middle."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.support.growth import Fullness, census, insight_environment, load, look
from tests.support.running_up import RunningUp, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

HALF: Final = 2500
# Small stores, full long before the middle; nothing is kept long for clients that may come back.
SMALL: Final = {
    "DIPTYCH_NUM_BLOCKS": "512",
    "DIPTYCH_BUDGET_BYTES": "1MiB",
    "DIPTYCH_DETACH_GRACE_S": "0.2",
    "DIPTYCH_LEASE_S": "5",
}
MOST: Final = {"num_tasks": 2, "num_fds": 8, "num_threads": 8, "num_objects": HALF // 2, "num_blocks": HALF,
               "rss_kib": 4096}  # fmt: skip
"""What the second half may add: less than one Python object for two requests, by which is seen what a request
leaves in a list or a map. The rest is what pools of threads and memory allow themselves."""


def at_rest() -> Counter[str]:
    """Waits until nobody holds anything; gives the store's keys by kind."""
    kinds: list[Counter[str]] = []

    def nothing_is_held() -> bool:
        found = census()
        assert found.store is not None
        kinds.append(found.store.kinds)
        accounts = [member.account for member in found.members]
        return all(
            account.num_held == account.num_running == account.num_waiting == account.blocks[2] == 0
            for account in accounts
            if account
        ) and not any(member.num_live or member.problem for member in found.members)

    wait_until(nothing_is_held, "nothing is held", 60.0)
    return kinds[-1]


def more(before: dict[str, Fullness], after: dict[str, Fullness]) -> list[str]:
    """What grew by more than it may, and in which kinds of object."""
    grown = []
    for name, full in after.items():
        was = before[name]
        for what, most in MOST.items():
            rise = getattr(full, what) - getattr(was, what)
            if rise > most:
                kinds = Counter(full.kinds)
                kinds.subtract(was.kinds)
                grown.append(f"{name}: {what} + {rise}; {kinds.most_common(5)}")
    return grown


def test_nothing_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told = insight_environment(tmp_path / "insight")
    with RunningUp(tmp_path, **SMALL, **told) as up:
        looks, keys = [], []
        for half in (0, 1):
            tally = asyncio.run(load(up.router, HALF, seed=half * HALF))
            assert tally.errors == []
            assert tally.num_whole + tally.num_left == HALF
            assert tally.num_left > HALF // 5
            keys.append(at_rest())
            looks.append(look(up))
        assert looks[0].keys() == looks[1].keys()
        assert {"router-0", "cache-0", "decode-0's engine", "prefill-0's engine"} <= looks[0].keys()
        assert more(*looks) == []
        # A record of an ended request stays for a minute; there is nothing else for each request. Of chunks a
        # few are just being told, or taken back.
        assert keys[0].keys() == keys[1].keys()
        assert [kind for kind in keys[1] if kind != "request" and keys[1][kind] > keys[0][kind] + 16] == []
        assert census().store.undying == []  # type: ignore[union-attr]
