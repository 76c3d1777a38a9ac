"""A request's life on a decode worker, and an attempt's life on a prefill worker, as tables.

    decode    ADMITTED ─▶ PREFILLING_LOCALLY ─▶ RUNNING ─▶ FINISHED
                  │ ▲                             │
                  │ └── PREEMPTED, ATTEMPT_LOST ◀─┤
                  └────▶ AWAITING_KV ─────────────┘        FAILED, ABORTED from every live state

    prefill   QUEUED ─▶ COMPUTING ─▶ ANNOUNCED ─▶ DONE     FAILED, ABORTED from every live state

A first token that ends the request finishes it from where it was drawn or landed. Terminal states are left
never.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from diptych.domain.errors import Internal


class DecodeState(Enum):
    """Where a request is on its decode worker."""

    ADMITTED = "admitted"
    PREFILLING_LOCALLY = "prefilling_locally"
    AWAITING_KV = "awaiting_kv"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


class DecodeEvent(Enum):
    """What moves it."""

    PREFILL_LOCALLY = "prefill_locally"
    ASK_PREFILL = "ask_prefill"
    FIRST_TOKEN = "first_token"
    PREEMPT = "preempt"
    ATTEMPT_LOST = "attempt_lost"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


class PrefillState(Enum):
    """Where an attempt is on its prefill worker."""

    QUEUED = "queued"
    COMPUTING = "computing"
    ANNOUNCED = "announced"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


class PrefillEvent(Enum):
    """What moves it."""

    START = "start"
    LAST_CHUNK = "last_chunk"
    ALL_RELEASED = "all_released"
    FAIL = "fail"
    CANCEL = "cancel"


_D, _E = DecodeState, DecodeEvent
_ENDS: Final = {_E.FAIL: _D.FAILED, _E.CANCEL: _D.ABORTED}

DECODE_TABLE: Final[dict[DecodeState, dict[DecodeEvent, DecodeState]]] = {
    _D.ADMITTED: {_E.PREFILL_LOCALLY: _D.PREFILLING_LOCALLY, _E.ASK_PREFILL: _D.AWAITING_KV, **_ENDS},
    _D.PREFILLING_LOCALLY: {
        _E.FIRST_TOKEN: _D.RUNNING,
        _E.PREEMPT: _D.ADMITTED,
        _E.FINISH: _D.FINISHED,
        **_ENDS,
    },
    _D.AWAITING_KV: {
        _E.FIRST_TOKEN: _D.RUNNING,
        _E.ATTEMPT_LOST: _D.ADMITTED,
        _E.PREEMPT: _D.ADMITTED,
        _E.FINISH: _D.FINISHED,
        **_ENDS,
    },
    _D.RUNNING: {_E.PREEMPT: _D.ADMITTED, _E.FINISH: _D.FINISHED, **_ENDS},
    _D.FINISHED: {},
    _D.FAILED: {},
    _D.ABORTED: {},
}
DECODE_TERMINAL: Final = frozenset({_D.FINISHED, _D.FAILED, _D.ABORTED})

_P, _Q = PrefillState, PrefillEvent
_PREFILL_ENDS: Final = {_Q.FAIL: _P.FAILED, _Q.CANCEL: _P.ABORTED}

PREFILL_TABLE: Final[dict[PrefillState, dict[PrefillEvent, PrefillState]]] = {
    _P.QUEUED: {_Q.START: _P.COMPUTING, **_PREFILL_ENDS},
    _P.COMPUTING: {_Q.LAST_CHUNK: _P.ANNOUNCED, **_PREFILL_ENDS},
    _P.ANNOUNCED: {_Q.ALL_RELEASED: _P.DONE, **_PREFILL_ENDS},
    _P.DONE: {},
    _P.FAILED: {},
    _P.ABORTED: {},
}
PREFILL_TERMINAL: Final = frozenset({_P.DONE, _P.FAILED, _P.ABORTED})


def advance_decode(state: DecodeState, event: DecodeEvent) -> DecodeState:
    """The state after `event`. Raises Internal where the table has no way."""
    try:
        return DECODE_TABLE[state][event]
    except KeyError:
        raise Internal(f"{event.value} is not possible in {state.value}") from None


def advance_prefill(state: PrefillState, event: PrefillEvent) -> PrefillState:
    """The state after `event`. Raises Internal where the table has no way."""
    try:
        return PREFILL_TABLE[state][event]
    except KeyError:
        raise Internal(f"{event.value} is not possible in {state.value}") from None
