"""Turns what a service observed into metrics, and lets go of the collector in bounded time at the end.

Without `OTEL_EXPORTER_OTLP_ENDPOINT` nothing is exported and recording costs a few microseconds. With it, a
thread of the SDK's own sends the figures every `OTEL_METRIC_EXPORT_INTERVAL`; it shares nothing with the
event loop.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from diptych.telemetry.instruments import (
    CATALOGUE,
    EVENT_LABEL,
    EVENTS_ABOUT,
    EVENTS_NAME,
    MAX_EVENTS,
    OTHER,
    Histogram,
)

CLOSE_S: Final = 2.0

_WORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,63}")

Counts = Callable[[], Mapping[str, int]]
"""Reads counts that only grow, by word. Called from the exporting thread: it must only read."""


class Recorder:
    """The metrics of one process. Made in its `__main__`, closed when it ends."""

    def __init__(self, service: str, worker_id: str, readers: Sequence[MetricReader] = ()) -> None:
        """`service` is the role ("router", "decode", …); `readers` take the figures out, none by default."""
        resource = Resource.create({"service.name": f"diptych-{service}", "service.instance.id": worker_id})
        # Closing is ours: at interpreter exit the SDK would wait half a minute for a collector that is down.
        self._provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("diptych")
        self._words: set[str] = set()
        self._histograms = {
            histogram.name: self._meter.create_histogram(
                histogram.name,
                histogram.unit,
                histogram.about,
                explicit_bucket_boundaries_advisory=list(histogram.buckets),
            )
            for histogram in CATALOGUE
        }

    def observe(self, histogram: Histogram, value: float, **labels: str) -> None:
        """One value, in the histogram's unit. Labels by the last part of their name: `path="local"`."""
        attributes = {}
        for name, allowed in histogram.labels.items():
            word = labels.pop(name.rpartition(".")[2], OTHER)
            attributes[name] = word if word in allowed else OTHER
        if labels:
            raise TypeError(f"{histogram.name} has no label {', '.join(sorted(labels))}")
        self._histograms[histogram.name].record(value, attributes)

    def watch(self, counts: Counts) -> None:
        """Give out counts that a service keeps anyway, such as its fallbacks by reason. Once a process."""

        def read(options: CallbackOptions) -> Iterable[Observation]:
            for word, count in self._bounded(counts()).items():
                yield Observation(count, {EVENT_LABEL: word})

        self._meter.create_observable_counter(EVENTS_NAME, [read], unit="{event}", description=EVENTS_ABOUT)

    def _bounded(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The same counts under at most `MAX_EVENTS` words; what is no plain word, or comes late, is `OTHER`.

        A word that was let in stays in, or its series would run backwards.
        """
        bounded: dict[str, int] = {}
        for word, count in counts.items():
            if len(self._words) < MAX_EVENTS and _WORD.fullmatch(word):
                self._words.add(word)
            name = word if word in self._words else OTHER
            bounded[name] = bounded.get(name, 0) + count
        return bounded

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left and let go, within `timeout_s` whatever the collector does. Blocks: not for a
        loop."""
        self._provider.shutdown(timeout_millis=timeout_s * 1000)


def recorder_from_environment(service: str, worker_id: str) -> Recorder:
    """A recorder that exports by OTLP where OpenTelemetry's own variables name an endpoint, else nowhere."""
    names = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not any(os.environ.get(name) for name in names):
        return Recorder(service, worker_id)
    # Imported where it is used: it costs every other start a tenth of a second.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return Recorder(service, worker_id, [PeriodicExportingMetricReader(OTLPMetricExporter())])
