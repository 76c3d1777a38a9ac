"""One request's output on its way to its router: text, stop strings, and the last message."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from diptych.domain.errors import InvalidField
from diptych.domain.ids import RequestId
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

REPLAY_TOKENS: Final = 1024
"""Most tokens in one message of a replay: some 130 KB, were every token a long run of spaces."""


class Output:
    """Turns what the engine says of one request into deltas, and keeps it for whoever attaches later.

    A stop string is found here, after the engine has drawn the token that completed it: the text ends before
    it, later tokens are dropped, and `stopped` tells the worker to end the request.

    Kept is each token with the text that it brought out, and the text that came with the last word. So a
    client that has the first n tokens, and with them the text that they brought out, gets exactly the rest.
    """

    __slots__ = ("_tail", "_text", "_texts", "finish", "stopped", "tokens")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, given: Sequence[int]) -> None:
        self.tokens = array("I", given)
        """All output, `given` and since."""
        self.stopped = ""
        self.finish: common_pb2.Finish | None = None
        self._text = OutputText(tokenizer, params.stop)
        self._texts = [self._text.push(token)[0] for token in given]
        self._tail = ""

    @staticmethod
    def stop_in(tokenizer: Tokenizer, params: SamplingParams, given: Sequence[int]) -> str:
        """The stop string that had ended a resumed request's text already, or empty.

        Its worker may have died between the token that completed it and the last message.
        """
        return StopStrings(params.stop).push(tokenizer.decode(given))[1] or ""

    def delta(self, out: TokensOut, worker_id: str) -> decode_pb2.Delta | None:
        """What the router is to hear of a step; None when it is nothing."""
        delta = decode_pb2.Delta(request_id=out.request_id, index=len(self.tokens))
        if not self.stopped:
            texts = self._push(out)
            delta.tokens.extend(out.tokens)
            delta.text = "".join(texts)
            self.tokens.extend(out.tokens)
            self._texts.extend(texts)
        if out.finish is not None:
            delta.finish.CopyFrom(self._end(out.finish, worker_id))
            delta.text += self._tail
        elif not delta.tokens:
            return None
        return delta

    def replay(self, request_id: RequestId, start: int) -> list[decode_pb2.Delta]:
        """What came from output `start` on, the last word included, in messages of bounded size.

        Raises InvalidField where there is no output `start` yet, and none comes next.
        """
        num_tokens = len(self.tokens)
        if start > num_tokens:
            raise InvalidField("next_index", f"is {start}, there are {num_tokens} tokens")
        cuts = range(start, num_tokens, REPLAY_TOKENS)
        deltas = [
            decode_pb2.Delta(
                request_id=request_id,
                index=cut,
                tokens=self.tokens[cut : cut + REPLAY_TOKENS],
                text="".join(self._texts[cut : cut + REPLAY_TOKENS]),
            )
            for cut in cuts
        ]
        if self.finish is not None:
            deltas = deltas or [decode_pb2.Delta(request_id=request_id, index=num_tokens)]
            deltas[-1].text += self._tail
            deltas[-1].finish.CopyFrom(self.finish)
        return deltas

    def _push(self, out: TokensOut) -> list[str]:
        """The text that each token brings out."""
        # The token that ended the request is not text.
        is_text = out.finish is None or out.finish.reason != "stop"
        texts = []
        for token in out.tokens:
            text, stop = self._text.push(token) if is_text and not self.stopped else ("", None)
            texts.append(text)
            self.stopped = self.stopped or stop or ""
        return texts

    def _end(self, finish: FinishInfo, worker_id: str) -> common_pb2.Finish:
        if not self.stopped and finish.reason in ("stop", "length"):
            self._tail, stop = self._text.flush()
            self.stopped = stop or ""
        reason = "stop" if self.stopped else finish.reason
        self.finish = common_pb2.Finish(
            reason=_REASONS[reason], stop=self.stopped, trail=trail_message(finish, worker_id)
        )
        if finish.failure is not None:
            failure = finish.failure
            self.finish.failure.CopyFrom(
                common_pb2.Failure(kind=failure.kind, message=failure.message, retry=failure.retry)
            )
        return self.finish


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
        num_borrowed_tokens=trail.num_borrowed_tokens,
    )
    message.fallbacks.extend(
        common_pb2.Fallback(reason=reason, count=count) for reason, count in sorted(trail.fallbacks.items())
    )
    return message
