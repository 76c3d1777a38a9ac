"""What the router records of a request that ended: figures under labels of closed sets, no id and no name."""

from __future__ import annotations

from diptych.telemetry.instruments import REQUEST_DURATION, TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN
from diptych.telemetry.recorder import Recorder
from diptych.v1 import common_pb2
from services.router.requests import LiveRequest


def record_end(recorder: Recorder, live: LiveRequest, finish: common_pb2.Finish) -> None:
    """Once a request, at its last word."""
    times = live.times
    reason = common_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    path = common_pb2.PrefillPath.Name(finish.trail.path).removeprefix("PREFILL_PATH_").lower()
    if times.ended_at is not None:
        recorder.observe(REQUEST_DURATION, times.ended_at - times.arrived_at, finish_reason=reason)
    ttft_s, tpot_s = times.ttft_s, times.tpot_s(len(live.output))
    if ttft_s is not None:
        recorder.observe(TIME_TO_FIRST_TOKEN, ttft_s, path=path)
    if tpot_s is not None:
        recorder.observe(TIME_PER_OUTPUT_TOKEN, tpot_s, path=path)
