"""Where the parts of one read go: in order, without gap or overlap, and never outside of the span."""

from __future__ import annotations

from diptych.domain.errors import TransferFailed
from diptych.domain.ports import MemorySpan


class Landing:
    """Takes the parts of a read into `span`. A part that is not the next one changes nothing."""

    def __init__(self, span: MemorySpan) -> None:
        self._view = span.view()
        self._num_bytes = span.num_bytes
        self._landed = 0

    def put(self, offset: int, data: memoryview) -> None:
        """Copies the next part. Raises TransferFailed unless it is the next, has bytes and fits."""
        if offset != self._landed:
            raise TransferFailed(f"a part came at {offset}, {self._landed} was next")
        if not 0 < len(data) <= self._num_bytes - self._landed:
            raise TransferFailed(f"a part of {len(data)} bytes came at {offset} of {self._num_bytes}")
        end = offset + len(data)
        self._view[offset:end] = data
        self._landed = end

    def check_complete(self) -> None:
        """Raises TransferFailed unless every byte has landed."""
        if self._landed != self._num_bytes:
            raise TransferFailed(f"only {self._landed} of {self._num_bytes} bytes came")
