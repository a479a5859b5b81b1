import itertools

import pytest

from herder.engine.text import StopFilter


def shown(pieces: list[str], stops: list[str], *, include_stop: bool = False) -> str:
    """All that a client sees of these pieces."""
    stop_filter = StopFilter(stops, include_stop=include_stop)
    text = ""
    for piece in pieces:
        text += stop_filter.add(piece)
        if stop_filter.found is not None:
            return text
    return text + stop_filter.finish()


def test_no_part_of_a_stop_string_is_shown() -> None:
    stop_filter = StopFilter(["DEFGHIJ"])
    seen = [stop_filter.add(letter) for letter in "ABCDEFGHIJ"]
    assert seen == ["A", "B", "C", *[""] * 7]
    assert stop_filter.found == "DEFGHIJ"


def test_only_a_real_beginning_of_a_stop_string_is_held() -> None:
    stop_filter = StopFilter(["</think>"])
    assert stop_filter.add("a long text with < inside") == "a long text with < inside"
    assert stop_filter.add(" </th") == " "
    assert stop_filter.add("ou") == "</thou"


def test_held_text_comes_out_at_the_end() -> None:
    assert shown(["count", " to STO"], ["STOP"]) == "count to STO"


def test_the_stop_string_is_left_out_or_included() -> None:
    assert shown(["5 6", " 7 8"], ["7"]) == "5 6 "
    assert shown(["5 6", " 7 8"], ["7"], include_stop=True) == "5 6 7"


@pytest.mark.parametrize("stops", [["bc"], ["abcd", "bc"], ["cab", "ca"], ["aa", "aab"], ["z"]])
@pytest.mark.parametrize("text", ["abcdabcab", "aaabca", "cabbage"])
def test_the_text_does_not_depend_on_how_it_was_cut(text: str, stops: list[str]) -> None:
    letters = shown(list(text), stops)
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert shown(pieces, stops) == letters


def test_a_stop_string_is_let_by_until_it_may_stop() -> None:
    stop_filter = StopFilter(["bc"])
    assert stop_filter.add("abc", may_stop=False) == "abc"
    assert stop_filter.add("bc") == ""
    assert stop_filter.found == "bc"


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopFilter([]).add("abc") == "abc"
