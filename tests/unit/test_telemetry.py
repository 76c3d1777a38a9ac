"""The log's two styles, closed label sets, and a collector that holds nobody up."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from diptych.telemetry.instruments import (
    HANDOFF_BYTES,
    MAX_EVENTS,
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
)
from diptych.telemetry.log import JsonFormatter, TextFormatter, configure_logging
from diptych.telemetry.recorder import Recorder, recorder_from_environment
from tests.support.rpc_fixtures import DEADLINE_S, Serve

Points = dict[tuple[tuple[str, str], ...], object]


@pytest.fixture
def reader() -> Iterator[InMemoryMetricReader]:
    return InMemoryMetricReader()


@pytest.fixture
def recorder(reader: InMemoryMetricReader) -> Iterator[Recorder]:
    recorder = Recorder("decode", "decode-1", [reader])
    yield recorder
    recorder.close()


def points(reader: InMemoryMetricReader, name: str) -> Points:
    """Labels → sum (histogram) or value (counter) of one metric."""
    data = reader.get_metrics_data()
    metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics if m.name == name]
    return {
        tuple(sorted(point.attributes.items())): getattr(point, "sum", None) or getattr(point, "value", None)
        for metric in metrics
        for point in metric.data.data_points
    }


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "services.decode.jobs", "msg": message, "args": args})
    made.levelname, made.created = "WARNING", 1_700_000_000.123
    vars(made).update(extra)
    return made


def test_text_is_one_line_with_its_fields() -> None:
    line = TextFormatter("decode-1").format(record("not posted:\n%s", "why", request_id="r-1"))
    clock, rest = line.split(" ", 1)
    assert clock.endswith(".123")
    assert rest == r"W decode-1 services.decode.jobs: not posted:\nwhy request_id=r-1"


def test_json_is_one_object_with_its_fields() -> None:
    line = JsonFormatter("decode-1").format(record("not posted: %s", "why\n", request_id="r-1", odd={1}))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.123Z",
        "level": "warning",
        "logger": "services.decode.jobs",
        "process": "decode-1",
        "message": "not posted: why\n",
        "request_id": "r-1",
        "odd": "{1}",
    }


@pytest.mark.parametrize("formatter", [TextFormatter("p"), JsonFormatter("p")])
def test_a_traceback_and_a_trace_id_are_kept(formatter: logging.Formatter) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1)))
    with use_span(span):
        line = formatter.format(failed)
    assert "KeyError: 'lost'" in line
    assert f"{0xABC:032x}" in line


def test_configured_logging_is_quiet_and_takes_warnings_too(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging("warning", "json", "decode-1")
        logging.getLogger("services.decode").info("not this")
        logging.getLogger("services.decode").warning("this")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("and this", stacklevel=1)
    finally:
        logging.captureWarnings(False)
        root.handlers[:], root.level = before
    out, err = capfd.readouterr()
    assert out == ""
    first, second = map(json.loads, err.splitlines())
    assert (first["message"], second["logger"]) == ("this", "py.warnings")


@pytest.mark.parametrize(("level", "style"), [("loud", "text"), ("warning", "xml")])
def test_unknown_words_are_refused(level: str, style: str) -> None:
    with pytest.raises(ValueError, match="(?i)loud|xml"):
        configure_logging(level, style, "x")


def test_values_and_labels_arrive(recorder: Recorder, reader: InMemoryMetricReader) -> None:
    recorder.observe(TIME_TO_FIRST_TOKEN, 0.25, path="local")
    recorder.observe(TIME_TO_FIRST_TOKEN, 0.5, path="local")
    recorder.observe(HANDOFF_BYTES, 4096)

    assert points(reader, "gen_ai.server.time_to_first_token") == {(("diptych.path", "local"),): 0.75}
    assert points(reader, "diptych.handoff.size") == {(): 4096}


def test_labels_stay_in_their_sets(recorder: Recorder, reader: InMemoryMetricReader) -> None:
    for number in range(50):
        recorder.observe(REQUEST_DURATION, 1.0, finish_reason=f"tenant-{number}")
    recorder.observe(REQUEST_DURATION, 1.0)
    assert points(reader, REQUEST_DURATION.name) == {(("diptych.finish_reason", "other"),): 51.0}
    with pytest.raises(TypeError, match="no label tenant"):
        recorder.observe(REQUEST_DURATION, 1.0, finish_reason="stop", tenant="t")


def test_watched_counts_are_read_live_and_bounded(recorder: Recorder, reader: InMemoryMetricReader) -> None:
    counts = {"begin_refused": 2, "a word\nof a client": 1}
    recorder.watch(lambda: counts)
    name = "diptych.event"
    assert points(reader, "diptych.events") == {((name, "begin_refused"),): 2, ((name, "other"),): 1}

    counts |= {f"word_{number:04d}": 1 for number in range(MAX_EVENTS * 2)}
    counts["begin_refused"] = 7
    found = points(reader, "diptych.events")
    assert found[((name, "begin_refused"),)] == 7
    assert len(found) == MAX_EVENTS + 1
    assert sum(found.values()) == sum(counts.values())  # type: ignore[arg-type]


async def test_the_last_figures_reach_the_collector(serving: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[ExportMetricsServiceRequest] = []

    class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
        async def Export(self, request: ExportMetricsServiceRequest, context: Any) -> object:  # noqa: N802
            received.append(request)
            return ExportMetricsServiceResponse()

    add = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    server = await serving(partial(add, Collector()))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{server.address}")
    recorder = recorder_from_environment("decode", "decode-1")
    recorder.observe(HANDOFF_BYTES, 4096)
    await asyncio.to_thread(recorder.close, DEADLINE_S)

    (resource,) = received[-1].resource_metrics
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("diptych-decode", "decode-1")
    (metric,) = [m for scope in resource.scope_metrics for m in scope.metrics]
    assert (metric.name, metric.unit) == ("diptych.handoff.size", "By")
    assert metric.histogram.data_points[0].sum == 4096


def test_nothing_is_exported_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    recorder = recorder_from_environment("router", "router-1")
    recorder.observe(HANDOFF_BYTES, 1)
    recorder.close()
    assert "OtelPeriodicExportingMetricReader" not in {thread.name for thread in threading.enumerate()}


PROGRAM = """
import time
from diptych.telemetry.instruments import HANDOFF_BYTES
from diptych.telemetry.recorder import recorder_from_environment
recorder = recorder_from_environment("decode", "decode-1")
recorder.observe(HANDOFF_BYTES, 1)
begun = time.monotonic()
recorder.close(0.5)
print(time.monotonic() - begun)
"""


@pytest.mark.parametrize("listens", [True, False], ids=["accepts and never answers", "is not there"])
def test_a_dead_collector_does_not_hold_up_the_exit(listens: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}"
        if not listens:
            collector.close()
        # The timeout is for the whole process, start and exit included; an export alone would take 10 s.
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
            capture_output=True,
            text=True,
            timeout=8,
            check=True,
        )
    assert float(result.stdout) < 2.0, result.stderr
