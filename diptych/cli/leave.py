"""SIGINT, SIGTERM and SIGHUP as a wish to leave, for commands that own child processes.

The first signal sets a flag that the command's loop looks at; a second means at once. No exception is raised
in the middle of starting a child.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LeaveSignals:
    """Listens while entered; the earlier dispositions come back afterwards. Main thread only."""

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> bool:
        """Whether somebody wants us to leave."""
        return self._count > 0

    def urged(self) -> bool:
        """Whether somebody has said so twice."""
        return self._count > 1

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, disposition in self._before.items():
            signal.signal(number, disposition)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
