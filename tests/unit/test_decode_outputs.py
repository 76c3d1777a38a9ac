"""Output of a decode worker: text, stop strings and the last message, over the engine's deltas."""

from __future__ import annotations

from diptych.domain.ids import RequestId
from diptych.domain.sampling import SamplingParams
from diptych.text.tokenizer import ByteTokenizer
from diptych.v1 import common_pb2, decode_pb2
from services.decode.messages import FinishInfo, TokensOut, TrailInfo
from services.decode.outputs import Output

BYTES = ByteTokenizer()
TRAIL = TrailInfo("p", "local", "short_prompt", 0, 3, 0, 0, 0, "", 0, 0, 0, 0, 0, 0, 0, {"digest_wrong": 2})


def out(index: int, tokens: bytes | list[int], reason: str = "") -> TokensOut:
    return TokensOut(RequestId("r"), index, list(tokens), FinishInfo(reason, TRAIL) if reason else None)


def deltas(output: Output, *steps: TokensOut) -> list[decode_pb2.Delta]:
    return [delta for step in steps if (delta := output.delta(step, "w")) is not None]


def test_text_lags_behind_an_unfinished_character_and_comes_out_whole() -> None:
    smiley = "\N{GRINNING FACE}".encode()
    output = Output(BYTES, SamplingParams(max_tokens=9), [])
    got = deltas(output, *(out(i, smiley[i : i + 1]) for i in range(4)))
    assert [delta.text for delta in got] == ["", "", "", "\N{GRINNING FACE}"]
    assert [delta.index for delta in got] == [0, 1, 2, 3]


def test_the_end_of_sequence_is_a_token_but_not_text() -> None:
    (delta,) = deltas(Output(BYTES, SamplingParams(max_tokens=9), []), out(0, [97, 256], "stop"))
    assert (list(delta.tokens), delta.finish.reason) == ([97, 256], common_pb2.FINISH_REASON_STOP)


def test_a_stop_string_ends_the_text_and_later_tokens_are_dropped() -> None:
    output = Output(BYTES, SamplingParams(max_tokens=9, stop=("bc",)), [])
    got = deltas(output, out(0, b"a"), out(1, b"b"), out(2, b"c"), out(3, b"d"), out(4, [], "abort"))
    assert output.stopped == "bc"
    assert "".join(delta.text for delta in got) == "a"
    assert [token for delta in got for token in delta.tokens] == list(b"abc")
    assert got[-1].index == 3
    assert (got[-1].finish.reason, got[-1].finish.stop) == (common_pb2.FINISH_REASON_STOP, "bc")


def test_a_stop_string_within_the_last_step_wins_over_the_length() -> None:
    output = Output(BYTES, SamplingParams(max_tokens=2, stop=("b",)), [])
    got = deltas(output, out(0, b"a"), out(1, b"b", "length"))
    assert got[-1].finish.reason == common_pb2.FINISH_REASON_STOP


def test_what_was_held_for_a_stop_string_comes_out_at_the_end() -> None:
    output = Output(BYTES, SamplingParams(max_tokens=2, stop=("bcd",)), [])
    got = deltas(output, out(0, b"b"), out(1, b"c", "length"))
    assert "".join(delta.text for delta in got) == "bc"
    assert got[-1].finish.reason == common_pb2.FINISH_REASON_LENGTH


def test_a_resumed_output_goes_on_where_the_first_one_was() -> None:
    output = Output(BYTES, SamplingParams(max_tokens=9, stop=("xy",)), list(b"ax"))
    got = deltas(output, out(2, b"z"), out(3, b"!", "length"))
    assert "".join(delta.text for delta in got) == "xz!"
    assert [delta.index for delta in got] == [2, 3]


def test_a_text_that_had_ended_before_the_resumption_is_noticed() -> None:
    params = SamplingParams(max_tokens=9, stop=("bc",))
    assert Output.stop_in(BYTES, params, list(b"abc")) == "bc"
    assert Output.stop_in(BYTES, params, list(b"ab")) == ""


def test_the_trail_names_the_fallbacks() -> None:
    (delta,) = deltas(Output(BYTES, SamplingParams(max_tokens=1), []), out(0, b"a", "length"))
    trail = delta.finish.trail
    assert (trail.decode_worker, trail.path) == ("w", common_pb2.PREFILL_PATH_LOCAL)
    assert [(f.reason, f.count) for f in trail.fallbacks] == [("digest_wrong", 2)]
