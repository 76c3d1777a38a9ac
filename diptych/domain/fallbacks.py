"""Why a request went another way than the one that it was meant to go: two closed sets.

    path reason     why its prompt was prefilled where it was; each request has one
    fallback        what came to nothing on the way; a request has as many as it had bad luck

Both are in the trail of a request's last message, and the decode worker counts each of them under its name
(path reasons of local prefill with `LOCAL` before them). What routers do to a request (its worker was lost,
it came from another router) has words of its own, `services.router.decisions.Reason`. All are metric labels:
none is ever made up at run time.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class PathReason(StrEnum):
    """Why a prompt was prefilled where it was."""

    LONG_PROMPT = "long_prompt"
    """Handed off: it is long enough for that."""
    DECODE_BUSY = "decode_busy"
    """Handed off although it is short: here it would have taken longer."""
    COLOCATED = "colocated"
    """Here: this worker never hands off."""
    SHORT_PROMPT = "short_prompt"
    """Here: the hop would cost more than it saves."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    STORE_UNAVAILABLE = "store_unavailable"
    LINK_TOO_SLOW = "link_too_slow"
    ATTEMPTS_FAILED = "attempts_failed"
    """Here, after hand-offs that came to nothing; its fallbacks say why each did."""


class Fallback(StrEnum):
    """What came to nothing."""

    # No hand-off was tried, or nobody took it up.
    NO_PREFILL_WORKER = "no_prefill_worker"
    STORE_UNAVAILABLE = "store_unavailable"
    LINK_TOO_SLOW = "link_too_slow"
    BEGIN_TIMEOUT = "begin_timeout"
    CLAIM_STALLED = "claim_stalled"
    """A prefill worker claimed the job and went silent."""
    JOB_GONE = "job_gone"
    """The store lost it."""
    # An attempt was lost.
    PREFILL_LOST = "prefill_lost"
    PREFILL_STALLED = "prefill_stalled"
    PREFILL_FAILED = "prefill_failed"
    PREFILL_TOO_SMALL = "prefill_too_small"
    TRANSFER_FAILED = "transfer_failed"
    DIGEST_WRONG = "digest_wrong"
    LAYOUT_MISMATCH = "layout_mismatch"
    # The KV crossed, but not over the decode worker's best channel.
    CHANNEL_NOT_SPOKEN = "channel_not_spoken"
    """The prefill worker does not have it."""
    CHANNEL_TOO_SLOW = "channel_too_slow"
    CHANNEL_FAILED = "channel_failed"
    """Reads over it did not complete: now, or a short while ago."""
    # The prefill worker computed what others were said to hold.
    BORROW_NO_DIRECTORY = "borrow_no_directory"
    """Nobody could say who holds it."""
    BORROW_REFUSED = "borrow_refused"
    """Who was said to hold it did not lend it."""
    BORROW_FAILED = "borrow_failed"
    """It was lent, and could not be read, or was not what was lent."""
    UNKNOWN = "unknown"
    """A peer of another version gave a reason that has no name here."""


LOCAL: Final = "local_"
"""Before a path reason: how often a prompt was prefilled where it is decoded, for that reason."""
DISAGGREGATED: Final = "disaggregated"
"""Hand-offs that were completed."""
KV_BYTES: Final = "kv_bytes"
"""What they brought."""


def fallback_named(word: str) -> Fallback:
    """A word that came from a peer."""
    try:
        return Fallback(word)
    except ValueError:
        return Fallback.UNKNOWN
