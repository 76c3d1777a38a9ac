"""What a client gets that comes back at any moment: with what it had, exactly the whole."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import example, given

from diptych.domain.ids import RequestId
from diptych.domain.sampling import SamplingParams
from diptych.text.tokenizer import ByteTokenizer
from diptych.v1 import decode_pb2
from services.decode import outputs
from services.decode.messages import FinishInfo, TokensOut, TrailInfo
from services.decode.outputs import Output

BYTES = ByteTokenizer()
NAME = RequestId("r")
TRAIL = TrailInfo("", "local", "short_prompt", 0, 3, 0, 0, 0, "", 0, 0, 0, 0, 0, 0, 0, {})
EOS = 256

texts = st.text("ab\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}", min_size=1, max_size=24)
stops = st.lists(st.text("ab\N{GRINNING FACE}", min_size=1, max_size=3), max_size=3)


def run(output: Output, tokens: list[int], steps: list[int], reason: str) -> list[decode_pb2.Delta]:
    """The deltas of a whole life: `steps` says how many tokens each step brings, at most."""
    deltas, at = [], 0
    for size in [*steps, len(tokens)]:
        piece = tokens[at : at + size]
        is_last = at + size >= len(tokens)
        finish = FinishInfo(reason, TRAIL) if is_last else None
        if output.stopped:
            finish, piece = FinishInfo("abort", TRAIL), []
        delta = output.delta(TokensOut(NAME, at, piece, finish), "w")
        deltas += [delta] if delta is not None else []
        at += size
        if finish is not None:
            break
    return deltas


def gathered(deltas: list[decode_pb2.Delta], start: int = 0) -> tuple[list[int], str]:
    tokens: list[int] = []
    for delta in deltas:
        assert delta.index == start + len(tokens)
        tokens += delta.tokens
    return tokens, "".join(delta.text for delta in deltas)


@given(
    texts,
    stops,
    st.integers(0, 6),
    st.lists(st.integers(1, 3)),
    st.sampled_from(["length", "stop"]),
    st.data(),
)
@example("ab", ["abb"], 0, [], "length", None)
def test_a_client_that_comes_back_after_any_message_has_the_whole(
    text: str, stop: list[str], num_given: int, steps: list[int], reason: str, data: st.DataObject | None
) -> None:
    tokens = list(text.encode()) + ([EOS] if reason == "stop" else [])
    params = SamplingParams(max_tokens=200, stop=tuple(stop))
    given_tokens = tokens[: min(num_given, len(tokens) - 1)]
    if Output.stop_in(BYTES, params, given_tokens):
        given_tokens = []
    output = Output(BYTES, params, given_tokens)
    deltas = run(output, tokens[len(given_tokens) :], steps, reason)
    assert deltas[-1].HasField("finish")
    before = Output(BYTES, params, []).replay(NAME, 0)
    assert before == []
    given_text = gathered(Output(BYTES, params, given_tokens).replay(NAME, 0))[1]
    whole = gathered(deltas, len(given_tokens))

    num_had = data.draw(st.integers(0, len(deltas))) if data else 0
    had = gathered(deltas[:num_had], len(given_tokens))
    start = len(given_tokens) + len(had[0])
    rest = output.replay(NAME, start)

    got = gathered(rest, start)
    if num_had < len(deltas):
        assert (had[0] + got[0], had[1] + got[1]) == whole
    assert [delta.HasField("finish") for delta in rest] == [False] * (len(rest) - 1) + [True]
    assert rest[-1].finish == deltas[-1].finish

    from_the_start = gathered(output.replay(NAME, 0))
    assert from_the_start == (given_tokens + whole[0], given_text + whole[1])


@given(texts, stops, st.integers(1, 5))
def test_a_replay_is_cut_into_messages_of_bounded_size(text: str, stop: list[str], most: int) -> None:
    params = SamplingParams(max_tokens=200, stop=tuple(stop))
    output = Output(BYTES, params, [])
    whole = gathered(run(output, list(text.encode()), [1] * 200, "length"))
    usual, outputs.REPLAY_TOKENS = outputs.REPLAY_TOKENS, most  # type: ignore[misc]
    try:
        for start in range(len(whole[0]) + 1):
            deltas = output.replay(NAME, start)
            tokens, rest = gathered(deltas, start)
            assert tokens == whole[0][start:]
            assert max(len(delta.tokens) for delta in deltas) <= most
            assert whole[1].endswith(rest)
    finally:
        outputs.REPLAY_TOKENS = usual  # type: ignore[misc]


@given(texts, stops, st.data())
def test_a_running_request_goes_on_after_the_replay(text: str, stop: list[str], data: st.DataObject) -> None:
    tokens = list(text.encode())
    params = SamplingParams(max_tokens=200, stop=tuple(stop))
    whole = gathered(run(Output(BYTES, params, []), tokens, [1] * 200, "length"))
    output = Output(BYTES, params, [])
    cut = data.draw(st.integers(0, max(0, len(whole[0]) - 1)))
    had = [d for i in range(cut) if (d := output.delta(TokensOut(NAME, i, [tokens[i]]), "w")) is not None]
    start = data.draw(st.integers(0, cut))
    rest = output.replay(NAME, start)
    rest += run(output, tokens[cut:], [1] * 200, "length")

    assert gathered(had[:start])[0] + gathered(rest, start)[0] == whole[0]
    assert gathered(had[:start])[1] + gathered(rest, start)[1] == whole[1]
