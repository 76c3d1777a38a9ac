"""HARD_CASES K: however text is cut into tokens, and wherever another process takes over, it stays the same
text."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diptych.text.chat import ChatMessage, ChatTemplate, encode_chat
from diptych.text.detokenize import Detokenizer
from diptych.text.output import OutputText
from diptych.text.stops import StopStrings
from diptych.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from tests.support.tiny_gguf import TEMPLATE
from tests.support.tiny_model import tiny_directory

TOY = ByteTokenizer()
LETTERS = "ab\u00e9\u65e5\U0001f600 "  # one to four bytes each, few enough for stop strings to occur
texts = st.text(LETTERS, max_size=24)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)
byte_ids = st.lists(st.integers(0, 260), max_size=24)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tiny_directory(tmp_path_factory.mktemp("text")))


def expected_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule in its plainest words: earliest end, then the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in set(stops) if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def drive(output: OutputText, ids: Sequence[int]) -> tuple[str, str | None]:
    """Pushes ids until a stop or their end."""
    given_out = ""
    for token_id in ids:
        text, stop = output.push(token_id)
        text.encode()  # valid by itself
        given_out += text
        if stop is not None:
            return given_out, stop
    text, stop = output.flush()
    return given_out + text, stop


@given(byte_ids)
def test_deltas_make_up_the_decoded_text_and_resume_anywhere(ids: list[int]) -> None:
    deltas = []
    detokenizer = Detokenizer(TOY)
    for cut in range(len(ids) + 1):
        rest = Detokenizer.resume(TOY, ids[:cut])
        tail = "".join(rest.push(i) for i in ids[cut:]) + rest.flush()
        assert "".join(deltas) + tail == TOY.decode(ids)
        if cut < len(ids):
            deltas.append(detokenizer.push(ids[cut]))


@given(texts)
def test_only_an_unfinished_character_is_held(text: str) -> None:
    detokenizer = Detokenizer(TOY)
    given_out = ""
    for i, char in enumerate(text):
        given_out += "".join(detokenizer.push(b) for b in char.encode())
        assert given_out == text[: i + 1]
    assert detokenizer.flush() == ""


@given(any_text)
@example("<|end|>")
@example("\u0301 \u200d\ufeff")
def test_what_is_encoded_is_decoded(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    detokenizer = Detokenizer(tiny)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text


@given(texts, stop_lists, st.lists(st.integers(0, 24), max_size=6))
def test_stops_do_not_depend_on_how_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    watcher = StopStrings(stops)
    given_out, found = "", None
    for start, end in pairwise(edges):
        part, found = watcher.push(text[start:end])
        given_out += part
        if found is not None:
            break
        seen = text[:end]
        prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((len(p) for p in prefixes if seen.endswith(p)), default=0)
        assert len(watcher.held) == longest  # no more and no less than may still become a stop
    if found is None:
        given_out += watcher.flush()
    assert (given_out, found) == expected_stop(text, stops)


@given(texts, stop_lists)
def test_another_process_takes_over_at_every_token(text: str, stops: list[str]) -> None:
    ids = TOY.encode(text)
    whole = drive(OutputText(TOY, stops), ids)
    assert whole == expected_stop(text, stops)
    first = OutputText(TOY, stops)
    given_out = ""
    for cut in range(len(ids) + 1):
        tail, stop = drive(OutputText.resume(TOY, stops, ids[:cut]), ids[cut:])
        assert (given_out + tail, stop) == whole
        if cut == len(ids):
            break
        part, stop = first.push(ids[cut])
        given_out += part
        if stop is not None:
            break


@given(byte_ids, stop_lists)
def test_so_it_does_within_broken_characters(ids: list[int], stops: list[str]) -> None:
    whole = drive(OutputText(TOY, stops), ids)
    assert whole == expected_stop(TOY.decode(ids), stops)


fragments = st.lists(
    st.sampled_from(
        ["<|", "end", "|>", "<|end|>", "<|start|>", "<", "|", ">", "e", " ", "\n", "\ue000", "\u65e5"]
    ),
    max_size=8,
).map("".join)


@given(st.lists(fragments, min_size=1, max_size=3))
def test_a_clients_text_is_never_a_control_token(tiny: Tokenizer, contents: list[str]) -> None:
    ids = encode_chat(tiny, ChatTemplate(TEMPLATE), [ChatMessage("user", content) for content in contents])
    expected = []
    for i, content in enumerate(contents):
        opening = ("\n" if i else "", f"user\n{content}")
        expected += [*tiny.encode(opening[0]), 1, *tiny.encode(opening[1]), 0]
    assert ids == [*expected, *tiny.encode("\n")]
