"""Stop strings and output text, by example. What must always hold is in `tests/properties/test_text.py`."""

import pytest

from diptych.text.output import OutputText
from diptych.text.stops import StopStrings
from diptych.text.tokenizer import ByteTokenizer


def test_text_flows_while_nothing_can_match() -> None:
    stops = StopStrings(["END"])
    assert stops.push("hello ") == ("hello ", None)
    assert stops.push("E") == ("", None)
    assert stops.held == "E"
    assert stops.push("x") == ("Ex", None)
    assert stops.push("EN") == ("", None)
    assert stops.push("EN") == ("EN", None)
    assert stops.push("D and more") == ("", "END")
    assert stops.held == ""


def test_a_stop_may_span_many_pushes_and_the_rest_is_dropped() -> None:
    stops = StopStrings(["\n\nQ:"])
    assert [stops.push(d) for d in ("a\n", "\n", "Q")] == [("a", None), ("", None), ("", None)]
    assert stops.push(":b") == ("", "\n\nQ:")


def test_the_first_to_complete_wins_and_of_those_the_longest() -> None:
    assert StopStrings(["bc", "abcd"]).push("xabcd") == ("xa", "bc")
    assert StopStrings(["c", "abc"]).push("xabc") == ("x", "abc")
    assert StopStrings(["aab"]).push("aaab") == ("a", "aab")


def test_what_is_held_comes_out_at_the_end() -> None:
    stops = StopStrings(["aab"])
    assert stops.push("xaaa") == ("xa", None)
    assert stops.flush() == "aa"
    assert stops.flush() == ""


def test_without_stops_nothing_is_held() -> None:
    stops = StopStrings([])
    assert stops.push("any") == ("any", None)
    assert StopStrings.resume([], "any").held == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_an_unfinished_character_at_the_end_may_complete_a_stop() -> None:
    output = OutputText(ByteTokenizer(), ["a\ufffd"])
    assert output.push(ord("a")) == ("", None)
    assert output.push(0xF0) == ("", None)
    assert output.flush() == ("", "a\ufffd")
