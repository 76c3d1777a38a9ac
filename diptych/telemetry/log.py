"""The log of a process: on stderr, quiet by default, one line a record, as text or as JSON.

    text   12:03:04.567 W decode-1a2b services.decode.jobs: not posted request_id=r-17
    json   {"time": "2026-…Z", "level": "warning", "logger": …, "process": …, "message": …, "request_id": …}

Modules use the standard library's loggers; what they pass as `extra` becomes fields. Where a trace is
current, its id is a field too, so that a line leads to the trace and back.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

from opentelemetry.trace import get_current_span

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
"""Attributes that every record has; the rest came as `extra`."""


def configure_logging(level: str, style: str, process: str) -> None:
    """Send this process's log to stderr, in place of whatever was set before.

    `level` is "debug", "info", "warning" or "error"; `style` is "text" or "json"; `process` names the source
    in each line (the worker id). Raises ValueError for other words.
    """
    formatters = {"text": TextFormatter, "json": JsonFormatter}
    if style not in formatters:
        raise ValueError(f"log style {style!r} is not one of {sorted(formatters)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatters[style](process))
    logging.captureWarnings(True)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """For people at a terminal; times are local."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone()
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        clock = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}"
        head = f"{clock} {record.levelname[0]} {self._process} {record.name}"
        # A message that spans lines would read as several records.
        message = record.getMessage().replace("\n", "\\n")
        return f"{head}: {message}{fields}{_traceback(self, record)}"


class JsonFormatter(logging.Formatter):
    """For machines; times are UTC."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        line.update(_fields(record))
        if trace := _traceback(self, record).strip():
            line["exception"] = trace
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    span = get_current_span().get_span_context()
    if span.is_valid:
        fields["trace_id"] = f"{span.trace_id:032x}"
    return fields


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return f"\n{formatter.formatException(record.exc_info)}" if record.exc_info else ""
