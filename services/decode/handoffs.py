"""The decode side of the hand-off transaction (brain). Decode supervises its prefills; it alone reads.

    post ─▶ unclaimed ─▶ begin ─▶ landing ─▶ complete ─▶ the request runs
              │ no Begin in time    │ failed, stalled, digest wrong twice
              ▼                     ▼
            lost                  lost       the scheduler decides: another prefill, or locally

**Who owns what.** The request's blocks belong to its holding all the time. A landing slot belongs to one
read, from `StartRead` until the loop reports its end, also when the attempt is void by then: nothing frees a
slot under a read in flight. Only the newest attempt is listened to; a message of another one changes nothing
and is counted. A job says how many attempts there were when it was posted: the first `Begin` for it counts,
and one that comes late (its worker was stopped, or the bus delivered the job twice) is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from diptych.domain.engine_report import FailureInfo
from diptych.domain.errors import DigestMismatch, Internal, PeerError
from diptych.domain.fallbacks import Fallback
from diptych.domain.ids import Attempt, RequestId
from diptych.domain.layout import KvLayout
from diptych.domain.slots import Slot, SlotRing
from services.decode.channels import ChannelChoice
from services.decode.effects import Effects, ReadKey, StartRead, Unpack
from services.decode.landing import Landing
from services.decode.messages import (
    AttemptEnded,
    BeginAnswer,
    BeginAsked,
    ChunkDone,
    ChunkReady,
    JobPosted,
    JobWithdrawn,
    ManifestReceived,
)
from services.decode.request import DecodeRequest

_REASONS = {
    "PeerLost": Fallback.PREFILL_LOST, "TooLarge": Fallback.PREFILL_TOO_SMALL,
    "DigestMismatch": Fallback.DIGEST_WRONG, "LayoutMismatch": Fallback.LAYOUT_MISMATCH,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """How long decode waits for its prefills, in seconds."""

    begin_timeout_s: float = 10.0
    """From posting a job to some prefill worker's `Begin`."""
    stall_timeout_s: float = 2.0
    """Between two signs of life of an attempt."""
    attempt_timeout_s: float = 120.0
    read_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Unclaimed:
    """A job on the bus, for which somebody must have begun by `deadline`."""

    posted_at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A request's prefill came to nothing."""

    request_id: RequestId
    reason: Fallback
    message: str
    num_landed: int = 0
    """Position up to which the prompt's KV had landed without a gap."""


class Handoffs:
    """All hand-offs under way on one decode worker. Mutates no request; reports `Lost` and completion."""

    def __init__(
        self,
        layout: KvLayout,
        ring: SlotRing[ReadKey],
        settings: HandoffSettings,
        choice: ChannelChoice | None = None,
    ) -> None:
        self._layout = layout
        self._fingerprint = layout.fingerprint
        self._ring = ring
        self.settings = settings
        self._choice = choice or ChannelChoice()
        self._unclaimed: dict[RequestId, Unclaimed] = {}
        self._landings: dict[RequestId, Landing] = {}
        self._reads: dict[ReadKey, Slot[ReadKey]] = {}
        self.effects = Effects()
        self.counters: Counter[str] = Counter()

    @property
    def num_unclaimed(self) -> int:
        return len(self._unclaimed)

    @property
    def unclaimed(self) -> Mapping[RequestId, Unclaimed]:
        return self._unclaimed

    @property
    def landings(self) -> Mapping[RequestId, Landing]:
        return self._landings

    def landing(self, request_id: RequestId) -> Landing | None:
        return self._landings.get(request_id)

    def post(self, request: DecodeRequest, now: float) -> None:
        """Puts the request's job on the bus."""
        timeout_s = self.settings.begin_timeout_s
        self._unclaimed[request.request_id] = Unclaimed(now, now + timeout_s)
        self.effects.posts.append(
            JobPosted(
                request.request_id, len(request.tokens), request.num_computed, request.priority, timeout_s,
                request.attempt,
            )
        )  # fmt: skip

    def abandon_unclaimed(self, reason: Fallback) -> list[Lost]:
        """Nobody is left who could claim a job."""
        gone = [(request_id, reason, "no prefill worker is left") for request_id in self._unclaimed]
        return [self._end(*loss) for loss in gone]

    def unposted(self, request_id: RequestId) -> Lost | None:
        """The bus did not take the job."""
        if self._unclaimed.pop(request_id, None) is None:
            return None
        return Lost(request_id, Fallback.STORE_UNAVAILABLE, "the bus took no job")

    def job_lost(self, request_id: RequestId, reason: Fallback) -> Lost | None:
        """Whoever claimed the job went silent before it began, or the store lost the job."""
        if request_id not in self._unclaimed:
            return None
        return self._end(request_id, reason, "nobody will begin the job")

    def begin(
        self, request: DecodeRequest | None, message: BeginAsked, banned: list[int], now: float
    ) -> bool:
        """Answers a prefill worker's `Begin`. True: a new attempt has begun, earlier ones are void."""
        refusal = self._refusal(request, message)
        if refusal is not None or request is None:
            self.counters["begin_refused"] += 1
            self.effects.begins.append(BeginAnswer(message.ticket, refusal=refusal))
            return False
        self._unclaimed.pop(request.request_id, None)
        attempt = Attempt(request.attempt + 1)
        self._landings[request.request_id] = Landing(
            attempt, message.prefill_worker, request.num_computed, len(request.tokens), now, now,
            frozenset(message.slow_channels),
        )  # fmt: skip
        self.effects.begins.append(
            BeginAnswer(
                message.ticket, attempt, list(request.tokens), request.params, banned,
                request.num_computed, request.root, self.settings.stall_timeout_s,
            )
        )  # fmt: skip
        return True

    def refuse_slow(self, message: BeginAsked) -> Lost | None:
        """Refuses a `Begin` over a link that must not be used. Its worker takes the job off the bus, so the
        request has to ask anew; one that asked already, or awaits nothing, is left as it is."""
        problem = f"the link to {message.prefill_worker} is past its bound"
        self.counters["begin_refused"] += 1
        refusal = FailureInfo("TransferFailed", problem)
        self.effects.begins.append(BeginAnswer(message.ticket, refusal=refusal))
        if self._unclaimed.pop(message.request_id, None) is None:
            return None
        return Lost(message.request_id, Fallback.LINK_TOO_SLOW, problem)

    def chunk(self, message: ChunkReady, now: float) -> Lost | None:
        """Takes an announcement."""
        landing = self._current(message.request_id, message.attempt, now)
        if landing is None:
            return None
        try:
            if not landing.accept(message, self._layout):
                self.counters["chunk_repeated"] += 1
        except PeerError as error:
            return self._lose(message.request_id, error)
        return None

    def manifest(self, message: ManifestReceived, now: float) -> Lost | None:
        """Takes the manifest of an attempt."""
        landing = self._current(message.request_id, message.attempt, now)
        if landing is None or landing.manifest is not None:
            return None
        try:
            landing.conclude(message, self._fingerprint, now)
        except PeerError as error:
            return self._lose(message.request_id, error)
        return None

    def alive(self, request_id: RequestId, attempt: Attempt, now: float) -> None:
        """A sign of life."""
        self._current(request_id, attempt, now)

    def failed(self, request_id: RequestId, attempt: Attempt, kind: str, message: str) -> Lost | None:
        """The prefill worker gave up, or its stream broke; `kind` is a class of the error tree."""
        landing = self._landings.get(request_id)
        if landing is None or landing.attempt != attempt:
            self.counters["stale_message"] += 1
            return None
        return self._end(request_id, _REASONS.get(kind, Fallback.PREFILL_FAILED), message)

    def start_reads(self, now: float) -> None:
        """Starts reads of announced chunks while landing slots are free, oldest attempt first."""
        for request_id, landing in self._landings.items():
            while landing.waiting:
                index = landing.waiting[0]
                key = ReadKey(request_id, landing.attempt, index, int(index in landing.retried))
                slot = self._ring.take(key, now, math.inf)
                if slot is None:
                    return
                landing.waiting.popleft()
                landing.started[index] = now
                chunk = landing.chunks[index]
                chosen = self._choice.choose(chunk.piece, chunk.others, landing.slow, key.turn, now)
                landing.read_over(index, chosen)
                self._reads[key] = slot
                self.effects.reads.append(
                    StartRead(key, chosen.piece, slot, chunk.digest, self.settings.read_timeout_s)
                )

    def read_ended(
        self, key: ReadKey, error: PeerError | None, request: DecodeRequest | None, now: float
    ) -> Unpack | Lost | None:
        """A read is over, its bytes checked against the digest. Frees its slot.

        An `Unpack` must be carried out before the next call, for the slot is free from then on.
        """
        self._ring.release(self._reads.pop(key))
        landing = self._landings.get(key.request_id)
        if landing is None or landing.attempt != key.attempt or request is None or request.holding is None:
            return None
        if error is not None:
            return self._read_again(key, landing, error, now)
        landing.landed.add(key.index)
        landing.handoff_s += now - landing.started[key.index]
        landing.heard_at = now
        self.effects.chunks_done.append(ChunkDone(key.request_id, key.attempt, key.index))
        chunk = landing.chunks[key.index]
        return Unpack(request.holding.tables, chunk.start, chunk.num_tokens)

    def finish(self, request_id: RequestId) -> Landing:
        """Ends a complete attempt."""
        landing = self._landings.pop(request_id)
        self.effects.ended.append(AttemptEnded(request_id, landing.attempt))
        return landing

    def void(self, request_id: RequestId, reason: str) -> None:
        """Ends whatever is under way for a request. Its reads in flight keep their slots until they end."""
        if self._unclaimed.pop(request_id, None) is not None:
            self.effects.withdrawals.append(JobWithdrawn(request_id))
        landing = self._landings.pop(request_id, None)
        if landing is not None:
            self.effects.ended.append(AttemptEnded(request_id, landing.attempt, reason))
            self.effects.stop_reads += [key for key in self._reads if key.request_id == request_id]

    def expire(self, now: float) -> list[Lost]:
        """Ends what has waited too long."""
        late = [
            (request_id, Fallback.BEGIN_TIMEOUT, "no prefill worker took the job in time")
            for request_id, job in self._unclaimed.items()
            if job.deadline <= now
        ]
        stall_s, attempt_s = self.settings.stall_timeout_s, self.settings.attempt_timeout_s
        for request_id, landing in self._landings.items():
            if now - landing.heard_at >= stall_s or now - landing.begun_at >= attempt_s:
                late.append((request_id, Fallback.PREFILL_STALLED, f"{landing.prefill_worker} went silent"))
        return [self._end(*loss) for loss in late]

    def next_deadline(self) -> float:
        """When `expire` has something to do at the earliest."""
        stall_s = self.settings.stall_timeout_s
        stalls = (landing.heard_at + stall_s for landing in self._landings.values())
        begins = (job.deadline for job in self._unclaimed.values())
        return min((*begins, *stalls), default=math.inf)

    def assert_empty(self) -> None:
        """Raises Internal unless nothing is under way and every landing slot is free."""
        self._ring.check_integrity()
        if self._unclaimed or self._landings or self._reads or self._ring.audit().taken:
            raise Internal(
                f"left: {len(self._unclaimed)} jobs, {len(self._landings)} attempts, "
                f"{len(self._reads)} reads, {self._ring.audit().taken} landing slots"
            )

    def _refusal(self, request: DecodeRequest | None, message: BeginAsked) -> FailureInfo | None:
        if request is None or not (
            request.request_id in self._unclaimed or request.request_id in self._landings
        ):
            return FailureInfo("Stale", f"request {message.request_id} awaits no prefill here")
        if message.num_attempts != request.attempt:
            return FailureInfo("Stale", f"attempt {request.attempt} of {message.request_id} has begun since")
        if message.fingerprint != self._fingerprint:
            return FailureInfo(
                "LayoutMismatch", f"KV of {message.fingerprint} can't be used with {self._fingerprint}"
            )
        return None

    def _current(self, request_id: RequestId, attempt: Attempt, now: float) -> Landing | None:
        landing = self._landings.get(request_id)
        if landing is None or landing.attempt != attempt:
            self.counters["stale_message"] += 1
            return None
        landing.heard_at = now
        return landing

    def _read_again(self, key: ReadKey, landing: Landing, error: PeerError, now: float) -> Lost | None:
        is_wrong = isinstance(error, DigestMismatch)
        self.counters["reads_wrong" if is_wrong else "reads_failed"] += 1
        if not is_wrong:
            self._choice.failed(landing.regions[key.index], now)
        if key.index in landing.retried:
            return self._lose(key.request_id, error)
        landing.retried.add(key.index)
        landing.waiting.appendleft(key.index)
        return None

    def _lose(self, request_id: RequestId, error: PeerError) -> Lost:
        reason = _REASONS.get(type(error).__name__, Fallback.TRANSFER_FAILED)
        return self._end(request_id, reason, str(error))

    def _end(self, request_id: RequestId, reason: Fallback, message: str) -> Lost:
        landing = self._landings.get(request_id)
        self.void(request_id, reason)
        return Lost(request_id, reason, message, landing.num_contiguous if landing else 0)
