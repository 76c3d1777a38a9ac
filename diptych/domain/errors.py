"""One tree of errors: whose fault it is, and whether doing it again can help.

    DiptychError
    ├── CallerError            the caller's: doing it again changes nothing
    │   ├── InvalidField         a field is out of its bounds (names the field and the bound)
    │   ├── UnknownModel         no worker serves this model
    │   ├── TooLarge             the request can never fit (context, share of the pool)
    │   └── Unsupported          a model file, format or feature that is not served
    ├── PeerError              another process's or the network's
    │   ├── Stale                an old epoch or attempt: refused, nothing changed
    │   ├── PeerLost             the peer died, stopped or broke the stream (retry: elsewhere)
    │   ├── LayoutMismatch       wire version, layout or model differ (no retry)
    │   ├── DigestMismatch       the bytes read are not the bytes announced (retry)
    │   ├── TransferFailed       a read did not complete (retry)
    │   └── StoreUnavailable     Redis does not answer (retry)
    └── OurError               ours
        ├── Overloaded           a bounded queue is full (retry after `retry_after_s`)
        ├── DeadlineExceeded     a wait ran out (retry is the caller's choice)
        ├── Cancelled            somebody asked for the end
        ├── Draining             this process is leaving (retry: elsewhere)
        └── Internal             an invariant broke

`diptych.rpc.status` turns these into gRPC status with `google.rpc` details and back; nothing else does.
"""

from __future__ import annotations


class DiptychError(Exception):
    """Root of the tree."""

    retry: bool = False
    """Whether the same call may succeed later or elsewhere."""


class CallerError(DiptychError):
    """The caller's fault."""


class InvalidField(CallerError):
    """A field is out of its bounds."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class UnknownModel(CallerError):
    """No worker serves this model."""


class TooLarge(CallerError):
    """The request can never fit; waiting does not help."""


class Unsupported(CallerError):
    """A model file, format or feature that is not served."""


class PeerError(DiptychError):
    """Another process's fault, or the network's."""


class Stale(PeerError):
    """An old epoch or attempt. Refused; nothing changed."""


class PeerLost(PeerError):
    """The peer died, stopped, or broke the stream."""

    retry = True


class LayoutMismatch(PeerError):
    """Wire version, layout fingerprint or model differ."""


class DigestMismatch(PeerError):
    """The bytes that were read are not the bytes that were announced."""

    retry = True


class TransferFailed(PeerError):
    """A read did not complete."""

    retry = True


class StoreUnavailable(PeerError):
    """Redis does not answer."""

    retry = True


class OurError(DiptychError):
    """Our own."""


class Overloaded(OurError):
    """A bounded queue is full."""

    retry = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(OurError):
    """A wait ran out."""

    retry = True


class Cancelled(OurError):
    """Somebody asked for the end."""


class Draining(OurError):
    """This process is leaving."""

    retry = True


class Internal(OurError):
    """An invariant broke."""


def named_error(kind: str, message: str) -> DiptychError:
    """The error that another process named; a class that is not known here comes as the root.

    InvalidField's message is "field: problem".
    """
    found = globals().get(kind)
    if found is InvalidField:
        field, _, problem = message.partition(": ")
        return InvalidField(field, problem)
    if isinstance(found, type) and issubclass(found, DiptychError):
        return found(message)
    return DiptychError(message)
