from __future__ import annotations

from codecs import utf_8_decode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.text import Detokenizer, StopMatch, StopStrings, Tokenizer

MIXED = ["hello ", "你好", "😀", "👩‍👩‍👧‍👦", "e\u0301", "한", " ", "\n", "2024", "<|im_end|>", "</s>", "नमस्ते", "👍🏽"]
TEXTS = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(MIXED), max_size=12).map("".join))


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(ids[start : start + size])
        start += size
    return [*parts, *([t] for t in ids[start:])]


def stream(detokenizer: Detokenizer, parts: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


SIZES = st.lists(st.integers(0, 5), max_size=8)


@given(text=TEXTS, sizes=SIZES)
def test_pieces_of_a_text_join_to_it_and_end_where_characters_end(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=[], skip_special_tokens=False)
    pieces = stream(detokenizer, chunks(ids, sizes))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 900), max_size=40), sizes=SIZES, skip=st.booleans(), spaces=st.booleans())
def test_pieces_of_any_tokens_join_to_the_decoded_text(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool, spaces: bool
) -> None:
    options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    pieces = stream(Detokenizer(tokenizer, prompt_token_ids=[], **options), chunks(ids, sizes))
    assert "".join(pieces) == tokenizer.decode(ids, **options)
    if spaces:
        data = b"".join(tokenizer.token_bytes_table(skip_special_tokens=skip)[t] for t in ids)
        whole = data.decode("utf-8", "replace")
        assert "".join(pieces) == (whole.removeprefix(" ") if tokenizer.num_spaces_stripped else whole)


@given(prompt=st.lists(st.integers(0, 900), max_size=8), ids=st.lists(st.integers(0, 900), max_size=20), sizes=SIZES)
def test_output_is_what_decoding_all_adds_to_the_prompt(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int]
) -> None:
    pieces = stream(Detokenizer(tokenizer, prompt_token_ids=prompt), chunks(ids, sizes))
    table = tokenizer.token_bytes_table(skip_special_tokens=True)
    finished, _ = utf_8_decode(b"".join(table[t] for t in prompt), "replace", False)
    if tokenizer.num_spaces_stripped:
        finished = finished.removeprefix(" ")
    assert finished + "".join(pieces) == tokenizer.decode([*prompt, *ids])


def test_no_half_character_is_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("𝄞")
    assert len(ids) == 4
    detokenizer = Detokenizer(byte_level, prompt_token_ids=[])
    assert [detokenizer.push([t]) for t in ids] == ["", "", "", "𝄞"]
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_are_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a한")[:-1]
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=tokenizer.encode("a"))
    shown = "".join(detokenizer.push([t]) for t in ids)
    assert "\ufffd" not in shown
    assert detokenizer.flush() == "\ufffd"


def test_a_character_that_the_prompt_left_unfinished_counts_as_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x한")
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=ids[:-1])
    assert detokenizer.push(ids[-1:]) == "한"


def test_space_after_the_prompt_stays_and_at_the_start_goes(sentencepiece: Tokenizer) -> None:
    hello = sentencepiece.encode("hello", add_special_tokens=False)
    bos = sentencepiece.bos_token_id
    assert Detokenizer(sentencepiece, prompt_token_ids=[bos]).push(hello) == "hello"
    assert Detokenizer(sentencepiece, prompt_token_ids=[bos, *hello]).push(hello) == " hello"
    assert Detokenizer(sentencepiece, prompt_token_ids=[bos], skip_special_tokens=False).push(hello) == " hello"


def test_special_tokens_without_spaces_between(sentencepiece: Tokenizer) -> None:
    hello = sentencepiece.encode("hello", add_special_tokens=False)
    ids = [1, *hello, 2, *hello]
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert sentencepiece.decode(ids, skip_special_tokens=False) == "<s> hello</s> hello"
    assert sentencepiece.decode(ids, **options) == "<s>hello</s>hello"
    detokenizer = Detokenizer(sentencepiece, prompt_token_ids=[1], **options)
    assert [detokenizer.push([t]) for t in (hello[0], 2)][1] == "</s>"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_or_not(byte_level: Tokenizer, skip: bool) -> None:
    ids = byte_level.encode("hello<|im_end|>")
    detokenizer = Detokenizer(byte_level, prompt_token_ids=[], skip_special_tokens=skip)
    assert detokenizer.push(ids) == ("hello" if skip else "hello<|im_end|>")


def stop_stream(pieces: list[str], stops: list[str], **options: bool) -> tuple[list[str], str | None]:
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
    shown, stop = stop_stream(pieces, stops, include_in_output=include)
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
    assert stop_stream(["one two three"], ["three", "two"]) == (["one "], "two")


def test_one_that_completes_inside_a_longer_one_wins() -> None:
    assert stop_stream(["x", "abcd"], ["abcd", "b"]) == (["x", "a"], "b")


def test_a_longer_one_that_completes_with_a_shorter_one_wins() -> None:
    assert stop_stream(["say hello"], ["lo", "hello"]) == (["say "], "hello")


def test_a_stop_string_over_three_pieces_is_never_shown() -> None:
    assert stop_stream(["text\n", "\nUs", "er: more"], ["\n\nUser:"]) == (["text", "", ""], "\n\nUser:")


def test_held_text_comes_when_it_turns_out_harmless() -> None:
    assert stop_stream(["a<", "/", "b"], ["</s>"]) == (["a", "", "</b", ""], None)


def test_held_text_comes_at_the_end() -> None:
    assert stop_stream(["a</"], ["</s>"]) == (["a", "</"], None)


def test_included_stop_string_holds_nothing_back() -> None:
    assert stop_stream(["a<", "/s> rest"], ["</s>"], include_in_output=True) == (["a<", "/s>"], "</s>")


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
