"""`diptych audit` and `diptych net`: what they print of an answer, as tables and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from diptych.cli import audit, census, net
from diptych.cli.census import Census, Member, Place, find_place
from diptych.cli.main import main
from diptych.cli.verdict import Finding, findings
from diptych.cli.whereabouts import announced
from diptych.domain.audit import Held
from diptych.domain.errors import PeerLost
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import Link, Role
from diptych.rpc.inspection import Account
from diptych.store.audit import BusAudit, Claim, ShardAudit

EPOCH = Epoch(2**62 + 1)
FAR = Link(
    WorkerId("prefill-0"), EPOCH, 0.0012, float(3 << 20), 4.0, too_slow=True, used=False, channel="grpc"
)
NEAR = Link(WorkerId("prefill-1"), EPOCH, 40e-6, 0.0, 4.0, channel="nixl")
NEW = Link(WorkerId("prefill-2"), EPOCH)
HELD = (
    Held("request", "r1", "router-0", 3.0, 4),
    Held("job", "r1", "bus", 12.0, 0, -2.0),
    Held("attempt", "r2/1 [bold]", "prefill-0", 1.0, 0, 100.0),
)
ACCOUNT = Account(
    WorkerId("decode-0"), EPOCH, 2, 0, (3, 1, 4, 8), (1, 4), HELD, 3, 0, "", 0.1, (FAR, NEAR, NEW), 50e-6, {}
)  # fmt: skip
DECODE = Member(WorkerId("decode-0"), Role.DECODE, EPOCH, "127.0.0.1:1", ACCOUNT)
PREFILL = Member(WorkerId("prefill-0"), Role.PREFILL, EPOCH, "127.0.0.1:2", problem="no answer")
ROUTER = Member(WorkerId("router-0"), Role.ROUTER, EPOCH, "127.0.0.1:3", num_live=2)


def store() -> ShardAudit:
    found = ShardAudit(foreign=["plan (string)"])
    found.kinds["request"] += 2
    found.num_requests["admitted"] += 2
    found.buses.append(BusAudit("main", 1, (Claim("r1", "prefill-0", 0.5, 1),), 1, ()))
    return found


def printed(what: Census, found: list[Finding]) -> str:
    text = io.StringIO()
    audit.print_audit(Console(file=text, width=200, highlight=False), what, found)
    return text.getvalue()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("DIPTYCH_ROUTER", "DIPTYCH_REDIS_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Census]:
    """What the next looks find; the command sleeps for no time."""
    coming: list[Census] = []

    async def take(place: Place, *, with_store: bool = True) -> Census:
        return coming.pop(0)

    monkeypatch.setattr(audit, "take", take)
    monkeypatch.setattr(census, "take", take)
    monkeypatch.setattr(audit, "SETTLE_S", 0.0)
    return coming


def run(*arguments: str) -> int:
    with announced("127.0.0.1:9", "unix:///nowhere", "main"):
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def test_everything_held_is_shown_and_by_whom() -> None:
    census = Census((DECODE, ROUTER), store())
    text = printed(census, [])
    for row in (
        ("decode", "decode-0", "2 + 0", "3", "1", "4", "8", "1/4", "3", "0"),
        ("router", "router-0", "2 live", *["–"] * 7),
        ("decode-0", "request", "r1", "router-0", "4", "3.0 s", "–"),
        ("decode-0", "attempt", "r2/1 [bold]", "prefill-0", "–", "1.0 s", "100.0 s"),
        ("decode-0", "prefill-0", "grpc", "1200 µs", "50 µs", "3.0 MiB/s", "4 s ago", "too slow, not used"),
        ("decode-0", "prefill-1", "nixl", "40 µs", "50 µs", "–", "4 s ago", "ok"),
        ("decode-0", "prefill-2", "–", "–", "50 µs", "–", "not yet"),
        ("request keys", "2", "admitted 2"),
        ("bus of main", "1 waiting, 1 claimed", "r1 by prefill-0 since 0.5 s"),
    ):
        assert any(tuple(part.strip() for part in line.split("   ") if part.strip()) == row
                   for line in text.splitlines()), (row, text)  # fmt: skip
    assert text.endswith("nothing is held that should not be\n")


def test_what_should_not_be_is_named_at_the_end() -> None:
    census = Census((DECODE, PREFILL, ROUTER), store())
    text = printed(census, findings(census))
    assert "decode-0: job r1: should have ended 2.0 s ago" in text
    assert "prefill-0: its registration: registered at 127.0.0.1:2, but: no answer" in text
    assert "store: key plan (string): is none of ours" in text
    assert text.endswith("these should not be\n")


def test_a_store_that_is_not_known_is_said_not_to_be_asked() -> None:
    assert "the store was not asked" in printed(Census((ROUTER,), None), [])


def test_json_is_complete_and_its_epochs_are_strings() -> None:
    census = Census((DECODE, PREFILL, ROUTER), store())
    told = json.loads(audit.audit_json(census, findings(census)))
    decode = told["members"][0]
    assert (decode["role"], decode["epoch"], decode["account"]["links"][0]["epoch"]) == (
        "decode", str(EPOCH), str(EPOCH),
    )  # fmt: skip
    assert decode["account"]["held"][1]["ends_in_s"] == -2.0
    assert told["store"]["kinds"] == {"request": 2}
    assert told["store"]["buses"][0]["claims"][0]["consumer"] == "prefill-0"
    assert [finding["what"] for finding in told["findings"]] == [
        "job r1", "its registration", "key plan (string)",
    ]  # fmt: skip


def test_the_status_tells_whether_something_should_not_be(
    looks: list[Census], capsys: pytest.CaptureFixture[str]
) -> None:
    clean = Census((ROUTER,), ShardAudit())
    looks[:] = [clean]
    assert run("audit") == 0
    dirty = Census((ROUTER,), store())
    looks[:] = [dirty, dirty]
    assert run("audit") == 1
    assert "these should not be" in capsys.readouterr().out
    looks[:] = [dirty, clean]
    assert run("audit", "--json") == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    looks[:] = [clean, dirty]  # the first look is enough where it is clean
    assert run("audit") == 0


def test_net_shows_the_links_alone(looks: list[Census], capsys: pytest.CaptureFixture[str]) -> None:
    shown_only = replace(ACCOUNT, links=(replace(FAR, used=True),))
    looks[:] = [Census((replace(DECODE, account=shown_only), ROUTER), None)] * 2
    assert run("net") == 0
    text = capsys.readouterr().out
    assert "too slow" in text
    assert "not used" not in text
    assert run("net", "--json") == 0
    [link] = json.loads(capsys.readouterr().out)
    assert (link["decode_worker"], link["worker_id"], link["rtt_s"]) == ("decode-0", "prefill-0", 0.0012)
    assert (link["max_rtt_s"], link["epoch"]) == (50e-6, str(EPOCH))


@pytest.mark.parametrize(("rtt_s", "shown"), [(0.0, "–"), (1e-9, "0.001 µs"), (4.26e-6, "4.26 µs")])
def test_microseconds(rtt_s: float, shown: str) -> None:
    assert net.microseconds(rtt_s) == shown


def test_where_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLost, match="no router is known"):
        find_place("", "", "")
    with announced("127.0.0.1:9", "unix:///s", "x"):
        assert find_place("", "", "") == Place("127.0.0.1:9", "unix:///s", "x")
        assert find_place("127.0.0.1:8", "", "") == Place("127.0.0.1:8", "", "main")
        assert find_place("", "redis://h", "") == Place("", "redis://h", "main")
        monkeypatch.setenv("REDIS_URL", "redis://e")
        assert find_place("", "", "y") == Place("", "redis://e", "y")
        monkeypatch.setenv("DIPTYCH_REDIS_URL", "redis://d")
        assert find_place("", "", "y").store == "redis://d"
