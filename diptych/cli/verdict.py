"""Which of the things that a system holds should not be there (pure).

One look catches a system in the middle of things: a request that has just ended may be gone here and not yet
there. So a finding counts only when a second look, a moment later, finds the same again (`lasting`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from diptych.cli.census import Census, Member
from diptych.domain.audit import Held
from diptych.domain.records import Role
from diptych.rpc.inspection import Account
from diptych.store.audit import BusAudit, ShardAudit

OVERDUE_S: Final = 1.0
"""What ends by itself may be late by so much."""
SILENT_S: Final = 5.0
"""An engine speaks several times a second."""
CLAIM_S: Final = 30.0
"""A claimed job leaves the bus with the answer to `Begin`, and is swept when that takes too long."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` at `where` should not be. `why` may tell times, and does not take part in comparisons."""

    where: str
    what: str
    why: str = field(compare=False)


def findings(census: Census) -> list[Finding]:
    """All of one look."""
    names = {member.worker_id for member in census.members}
    found = [finding for member in census.members for finding in _of_member(member, names)]
    return [*found, *(_of_store(census.store) if census.store is not None else ())]


def lasting(first: Iterable[Finding], second: Iterable[Finding]) -> list[Finding]:
    """Those of the second look that the first had too."""
    before = set(first)
    return [finding for finding in second if finding in before]


def _of_member(member: Member, names: Collection[str]) -> Iterator[Finding]:
    where, account = str(member.worker_id), member.account
    if member.problem:
        yield Finding(where, "its registration", f"registered at {member.address}, but: {member.problem}")
    if account is None:
        return
    if account.epoch != member.epoch:
        yield Finding(where, "its registration", f"another start of it answers at {member.address}")
    if account.silent_s > SILENT_S:
        yield Finding(where, "its engine", f"has said nothing for {account.silent_s:.1f} s")
    yield from _of_books(where, account)
    for held in account.held:
        if why := _fault(held, member.role, names):
            yield Finding(where, f"{held.kind} {held.name}", why)


def _of_books(where: str, account: Account) -> Iterator[Finding]:
    free, cached, owned, total = account.blocks
    if account.leaked:
        yield Finding(where, "leaked blocks", f"{account.leaked} belong to nobody: {account.leak}")
    elif owned and not account.num_running + account.num_waiting:
        yield Finding(where, "leaked blocks", f"{owned} have an owner, and no request is live")
    if free + cached + owned != total:
        yield Finding(where, "its blocks", f"{free} free, {cached} cached, {owned} owned are not {total}")


def _fault(held: Held, role: Role | None, names: Collection[str]) -> str:
    """Why a worker should not hold this; empty where it may."""
    if held.ends_in_s is not None and held.ends_in_s < -OVERDUE_S:
        return f"should have ended {-held.ends_in_s:.1f} s ago"
    if held.kind == "delivery":
        return "its engine knows nothing of it"
    is_request = held.kind == "request" and role is not None and role.decodes
    is_attempt = held.kind in ("attempt", "stream")
    if (is_request or is_attempt or held.kind == "chunk") and not held.owner:
        return "belongs to nobody"
    if is_attempt and held.owner not in names:
        return f"is for {held.owner}, which is not registered"
    return ""


def _of_store(audit: ShardAudit) -> Iterator[Finding]:
    for key in audit.foreign:
        yield Finding("store", f"key {key}", "is none of ours")
    for key in audit.undying:
        yield Finding("store", f"key {key}", "never expires")
    for request in audit.orphan_requests:
        yield Finding(
            "store", f"request {request}", "its decode worker is dead, and nobody has taken it over"
        )
    for holder, count in audit.dead_holders.items():
        yield Finding("store", f"chunks of {holder}", f"{count} locations of a worker that is dead")
    for bus in audit.buses:
        yield from _of_bus(bus)


def _of_bus(bus: BusAudit) -> Iterator[Finding]:
    where = f"bus of {bus.cell}"
    for job in bus.orphans:
        yield Finding(where, f"job {job}", "its decode worker is dead")
    for claim in bus.claims:
        if claim.idle_s > CLAIM_S:
            why = f"claimed by {claim.consumer} {claim.idle_s:.0f} s ago, and neither begun nor swept"
            yield Finding(where, f"claim of {claim.request_id}", why)
