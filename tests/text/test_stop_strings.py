from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.text import StopMatch, StopStrings


def stream(pieces: list[str], stops: list[str], **options: bool) -> tuple[list[str], str | None]:
    stop_strings = StopStrings(stops, **options)
    shown = []
    for piece in pieces:
        match = stop_strings.push(piece)
        shown.append(match.text)
        if match.stop is not None:
            return shown, match.stop
    return [*shown, stop_strings.flush()], None


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character; the first end at which a stop string stands decides, the longest on a tie."""
    for end in range(len(text) + 1):
        standing = [stop for stop in stops if text[:end].endswith(stop)]
        if standing:
            stop = max(standing, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def splits(text: str) -> st.SearchStrategy[list[str]]:
    cuts = st.lists(st.integers(0, len(text)), max_size=6).map(sorted)
    return cuts.map(lambda c: [text[a:b] for a, b in zip([0, *c], [*c, len(text)], strict=True)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[str], list[str]]:
    """A text, stop strings of which many are in it, and a split of the text."""
    text = draw(st.text("abcd", max_size=20))
    inside = st.tuples(st.integers(0, 20), st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = draw(st.lists(st.one_of(inside.filter(bool), st.text("abcd", min_size=1, max_size=6)), max_size=4))
    return text, stops, draw(splits(text))


@given(cases(), st.booleans())
@example(("aab", ["ab"], ["a", "a", "b"]), False)
def test_any_split_gives_what_the_whole_text_gives(case: tuple[str, list[str], list[str]], include: bool) -> None:
    text, stops, pieces = case
    shown, stop = stream(pieces, stops, include_in_output=include)
    assert ("".join(shown), stop) == oracle(text, stops, include)


@given(cases())
def test_only_what_may_begin_a_stop_string_is_held_back(case: tuple[str, list[str], list[str]]) -> None:
    _, stops, pieces = case
    stop_strings = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        match = stop_strings.push(piece)
        seen, shown = seen + piece, shown + match.text
        if match.stop is not None:
            return
        held = seen[len(shown) :]
        assert shown + held == seen
        assert not held or any(stop.startswith(held) for stop in stops)


def test_the_first_to_complete_wins_not_the_first_in_the_list() -> None:
    assert stream(["one two three"], ["three", "two"]) == (["one "], "two")


def test_one_that_completes_inside_a_longer_one_wins() -> None:
    assert stream(["x", "abcd"], ["abcd", "b"]) == (["x", "a"], "b")


def test_a_longer_one_that_completes_with_a_shorter_one_wins() -> None:
    assert stream(["say hello"], ["lo", "hello"]) == (["say "], "hello")


def test_a_stop_string_over_three_pieces_is_never_shown() -> None:
    assert stream(["text\n", "\nUs", "er: more"], ["\n\nUser:"]) == (["text", "", ""], "\n\nUser:")


def test_held_text_comes_when_it_turns_out_harmless() -> None:
    assert stream(["a<", "/", "b"], ["</s>"]) == (["a", "", "</b", ""], None)


def test_held_text_comes_at_the_end() -> None:
    assert stream(["a</"], ["</s>"]) == (["a", "</"], None)


def test_included_stop_string_holds_nothing_back() -> None:
    assert stream(["a<", "/s> rest"], ["</s>"], include_in_output=True) == (["a<", "/s>"], "</s>")


def test_text_before_min_tokens_is_no_part_of_a_stop_string() -> None:
    stop_strings = StopStrings(["stop"])
    assert stop_strings.push("stop st", may_stop=False) == StopMatch("stop st", None)
    assert stop_strings.push("op") == StopMatch("op", None)
    assert stop_strings.push("stop") == StopMatch("", "stop")


def test_held_text_comes_when_it_can_no_longer_stop() -> None:
    stop_strings = StopStrings(["stop"])
    assert stop_strings.push("st") == StopMatch("", None)
    assert stop_strings.push("op", may_stop=False) == StopMatch("stop", None)


def test_nothing_may_follow_the_stop() -> None:
    stop_strings = StopStrings(["x"])
    stop_strings.push("x")
    with pytest.raises(AssertionError):
        stop_strings.push("y")
