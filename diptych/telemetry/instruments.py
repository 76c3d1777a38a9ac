"""The catalogue: every figure that a Diptych process gives out, and every value its labels can have.

Labels come from closed sets, so that no series is minted by a request: never a request id, a tenant or a
string from a client. Names are those of OpenTelemetry's GenAI conventions where there is one, with the bucket
edges that they advise; ours begin with `diptych.`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

OTHER: Final = "other"
"""Stands for a label value outside its set: the figure counts, the series stay bounded, and a test sees
it."""

FINISH_REASONS: Final = frozenset({"stop", "length", "abort", "error"})
PATHS: Final = frozenset({"disaggregated", "local"})


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution. `buckets` are upper edges in `unit`."""

    name: str
    unit: str
    about: str
    buckets: tuple[float, ...]
    labels: Mapping[str, frozenset[str]] = field(default_factory=dict)


REQUEST_DURATION: Final = Histogram(
    "gen_ai.server.request.duration",
    "s",
    "From a request's arrival to its last token.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    {"diptych.finish_reason": FINISH_REASONS},
)
TIME_TO_FIRST_TOKEN: Final = Histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From a request's arrival to its first token.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    {"diptych.path": PATHS},
)
TIME_PER_OUTPUT_TOKEN: Final = Histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time between the tokens of one request after its first.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    {"diptych.path": PATHS},
)
HANDOFF_BYTES: Final = Histogram(
    "diptych.handoff.size",
    "By",
    "KV that crossed to the decode worker for one request.",
    tuple(float(1 << power) for power in range(16, 34, 2)),
)
HANDOFF_EXPOSED: Final = Histogram(
    "diptych.handoff.exposed_duration",
    "s",
    "What the hand-off added to TTFT: from the last chunk computed to the last one landed.",
    (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)

CATALOGUE: Final = (
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    HANDOFF_BYTES,
    HANDOFF_EXPOSED,
)

EVENTS_NAME: Final = "diptych.events"
EVENTS_ABOUT: Final = "What happened that was not the plain course: fallbacks, retries, refusals, by word."
EVENT_LABEL: Final = "diptych.event"
MAX_EVENTS: Final = 200
"""Most different words that one process may count; the rest go under `OTHER`."""
