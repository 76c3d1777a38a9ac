"""One request's output on its way to its router: text, stop strings, and the last message."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.domain.sampling import SamplingParams
from diptych.text.output import OutputText
from diptych.text.stops import StopStrings
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import common_pb2, decode_pb2
from services.decode.messages import FinishInfo, TokensOut

_REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORT,
    "error": common_pb2.FINISH_REASON_ERROR,
}
_PATHS = {"local": common_pb2.PREFILL_PATH_LOCAL, "disaggregated": common_pb2.PREFILL_PATH_DISAGGREGATED}


class Output:
    """Turns what the engine says of one request into deltas.

    A stop string is found here, after the engine has drawn the token that completed it: the text ends before
    it, later tokens are dropped, and `stopped` tells the worker to end the request.
    """

    __slots__ = ("_index", "_text", "stopped")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, given: Sequence[int]) -> None:
        self._index = len(given)
        self._text = OutputText.resume(tokenizer, params.stop, given)
        self.stopped = ""

    @staticmethod
    def stop_in(tokenizer: Tokenizer, params: SamplingParams, given: Sequence[int]) -> str:
        """The stop string that had ended a resumed request's text already, or empty.

        Its worker may have died between the token that completed it and the last message.
        """
        return StopStrings(params.stop).push(tokenizer.decode(given))[1] or ""

    def delta(self, out: TokensOut, worker_id: str) -> decode_pb2.Delta | None:
        """What the router is to hear of a step; None when it is nothing."""
        delta = decode_pb2.Delta(request_id=out.request_id, index=self._index)
        if not self.stopped:
            delta.tokens.extend(out.tokens)
            delta.text = self._push(out)
            self._index += len(out.tokens)
        if out.finish is not None:
            self._finish(delta, out.finish, worker_id)
        elif not delta.tokens:
            return None
        return delta

    def _push(self, out: TokensOut) -> str:
        pieces = []
        for token in out.tokens:
            if out.finish is not None and out.finish.reason == "stop":
                break  # the token that ended the request is not text
            text, stop = self._text.push(token)
            pieces.append(text)
            if stop is not None:
                self.stopped = stop
                break
        return "".join(pieces)

    def _finish(self, delta: decode_pb2.Delta, finish: FinishInfo, worker_id: str) -> None:
        if not self.stopped and finish.reason in ("stop", "length"):
            text, stop = self._text.flush()
            delta.text += text
            self.stopped = stop or ""
        reason = "stop" if self.stopped else finish.reason
        delta.finish.CopyFrom(
            common_pb2.Finish(
                reason=_REASONS[reason], stop=self.stopped, trail=trail_message(finish, worker_id)
            )
        )
        if finish.failure is not None:
            failure = finish.failure
            delta.finish.failure.CopyFrom(
                common_pb2.Failure(kind=failure.kind, message=failure.message, retry=failure.retry)
            )


def trail_message(finish: FinishInfo, worker_id: str) -> common_pb2.Trail:
    """The engine's account of a request, for the wire."""
    trail = finish.trail
    message = common_pb2.Trail(
        decode_worker=worker_id,
        prefill_worker=trail.prefill_worker if trail.path == "disaggregated" else "",
        path=_PATHS.get(trail.path, common_pb2.PREFILL_PATH_UNSPECIFIED),
        path_reason=trail.path_reason,
        attempts=trail.attempts,
        num_prompt_tokens=trail.num_prompt_tokens,
        num_cached_tokens=trail.num_cached_tokens,
        num_chunks=trail.num_chunks,
        kv_bytes=trail.kv_bytes,
        channel=trail.channel,
        queue_s=trail.queue_s,
        prefill_s=trail.prefill_s,
        handoff_s=trail.handoff_s,
        exposed_s=trail.exposed_s,
        decode_s=trail.decode_s,
        ttft_s=trail.ttft_s,
        num_preempted=trail.num_preempted,
    )
    message.fallbacks.extend(
        common_pb2.Fallback(reason=reason, count=count) for reason, count in sorted(trail.fallbacks.items())
    )
    return message
