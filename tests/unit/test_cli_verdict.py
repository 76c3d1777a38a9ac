"""Which of the things that a system holds should not be: the rules of `diptych audit`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.cli.census import Census, Member
from diptych.cli.verdict import CLAIM_S, OVERDUE_S, SILENT_S, Finding, findings, lasting
from diptych.domain.audit import Held
from diptych.domain.ids import Epoch, WorkerId
from diptych.domain.records import Role
from diptych.rpc.inspection import Account
from diptych.store.audit import BusAudit, Claim, ShardAudit

IDLE = Account(
    WorkerId("decode-0"), Epoch(7), 0, 0, (6, 2, 0, 8), (0, 4), (), 0, 0, "", 0.1, (), 0.0, {}
)  # fmt: skip


def member(account: Account | None = IDLE, role: Role = Role.DECODE, problem: str = "") -> Member:
    name = WorkerId(f"{role.value}-0")
    return Member(name, role, Epoch(7), "127.0.0.1:1", account, 0, problem)


def of(account: Account, role: Role = Role.DECODE) -> list[Finding]:
    peers = (member(None, Role.PREFILL if role is Role.DECODE else Role.DECODE), member(None, Role.ROUTER))
    return findings(Census((member(account, role), *peers), None))


def holding(held: Held, role: Role) -> list[Finding]:
    return of(replace(IDLE, num_running=1, held=(held,), num_held=1), role)


def test_an_idle_worker_is_as_it_should_be() -> None:
    assert of(IDLE) == []


@pytest.mark.parametrize(
    ("account", "what", "why"),
    [
        (replace(IDLE, blocks=(5, 2, 1, 8)), "leaked blocks", "1 have an owner, and no request is live"),
        (replace(IDLE, blocks=(5, 2, 0, 8)), "its blocks", "5 free, 2 cached, 0 owned are not 8"),
        (replace(IDLE, leaked=3, leak="group 0"), "leaked blocks", "3 belong to nobody: group 0"),
        (replace(IDLE, silent_s=SILENT_S + 1), "its engine", "has said nothing for 6.0 s"),
        (replace(IDLE, epoch=Epoch(8)), "its registration", "another start of it answers"),
    ],
)
def test_books_that_do_not_add_up(account: Account, what: str, why: str) -> None:
    [finding] = of(account)
    assert (finding.where, finding.what) == ("decode-0", what)
    assert why in finding.why


def test_blocks_of_live_requests_are_no_leak() -> None:
    assert of(replace(IDLE, blocks=(5, 2, 1, 8), num_running=1)) == []
    assert of(replace(IDLE, blocks=(5, 2, 1, 8), num_waiting=1)) == []


def test_a_registered_process_that_does_not_answer() -> None:
    [finding] = findings(Census((member(None, problem="no answer"),), None))
    assert finding == Finding("decode-0", "its registration", "")
    assert "no answer" in finding.why


@pytest.mark.parametrize(
    ("held", "role", "fault"),
    [
        (Held("request", "a", "router-0"), Role.DECODE, ""),
        (Held("request", "a"), Role.DECODE, "belongs to nobody"),
        (Held("request", "a"), Role.BOTH, "belongs to nobody"),
        (Held("request", "a", "router-9 (left)", ends_in_s=4.0), Role.DECODE, ""),
        (Held("delivery", "a", "router-0"), Role.DECODE, "its engine knows nothing of it"),
        (Held("last word", "a", "router-0", ends_in_s=200.0), Role.DECODE, ""),
        (Held("job", "a", "bus", 5.0, 0, 5.0), Role.DECODE, ""),
        (Held("job", "a", "bus", 12.0, 0, -OVERDUE_S / 2), Role.DECODE, ""),
        (Held("job", "a", "bus", 12.0, 0, -2 * OVERDUE_S), Role.DECODE, "should have ended 2.0 s ago"),
        (Held("attempt", "a/1", "prefill-0"), Role.DECODE, ""),
        (Held("attempt", "a/1", "prefill-9"), Role.DECODE, "is for prefill-9, which is not registered"),
        (Held("attempt", "a/1", "decode-0"), Role.PREFILL, ""),
        (Held("attempt", "a/1", ""), Role.PREFILL, "belongs to nobody"),
        (Held("stream", "a/1", "decode-9"), Role.PREFILL, "is for decode-9, which is not registered"),
        (Held("chunk", "a/1 chunk 0", "cache, decode", 1.0, 0, 29.0), Role.PREFILL, ""),
        (Held("chunk", "a/1 chunk 0", "", 1.0, 0, 29.0), Role.PREFILL, "belongs to nobody"),
        (Held("read", "a/1 chunk 0", "", 1.0, 0, 4.0), Role.DECODE, ""),
        (Held("loan", "00", "ipv4:127.0.0.1:2", 61.0, 0, -3.0), Role.CACHE, "should have ended 3.0 s ago"),
        (Held("fill", "00", "", 2.0), Role.CACHE, ""),
    ],
)
def test_what_is_held(held: Held, role: Role, fault: str) -> None:
    found = holding(held, role)
    assert [finding.why for finding in found] == ([fault] if fault else [])
    assert all(finding.what == f"{held.kind} {held.name}" for finding in found)


def test_the_store() -> None:
    audit = ShardAudit(
        foreign=["plan (string)"],
        undying=["chunk:00"],
        orphan_requests=["r1 of decode-0@6"],
    )
    audit.dead_holders["cache-0@6"] = 2
    old, fresh = Claim("r2", "prefill-0", CLAIM_S + 1, 1), Claim("r3", "prefill-0", 0.1, 1)
    audit.buses.append(BusAudit("main", 0, (old, fresh), 2, ("r4 of decode-0@6",)))
    found = findings(Census((), audit))
    assert [(finding.where, finding.what) for finding in found] == [
        ("store", "key plan (string)"),
        ("store", "key chunk:00"),
        ("store", "request r1 of decode-0@6"),
        ("store", "chunks of cache-0@6"),
        ("bus of main", "job r4 of decode-0@6"),
        ("bus of main", "claim of r2"),
    ]
    assert findings(Census((), ShardAudit())) == []


def test_only_what_a_second_look_finds_again_counts() -> None:
    seen, again, new = (
        Finding("w", "request a", "1 s"),
        Finding("w", "request a", "3 s"),
        Finding("w", "b", ""),
    )
    assert lasting([seen], [again, new]) == [again]
    assert lasting([seen], [again, new])[0].why == "3 s"
    assert lasting([new], []) == []
