from __future__ import annotations

from codecs import utf_8_decode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text import Detokenizer, Tokenizer

MIXED = ["hello ", "你好", "😀", "👩‍👩‍👧‍👦", "e\u0301", "한", " ", "\n", "2024", "<|im_end|>", "</s>", "नमस्ते", "👍🏽"]
TEXTS = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(MIXED), max_size=12).map("".join))


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(ids[start : start + size])
        start += size
    return [*parts, *([t] for t in ids[start:])]


def stream(detokenizer: Detokenizer, parts: list[list[int]]) -> list[str]:
    pieces = [detokenizer.push(part) for part in parts]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == detokenizer.text
    return pieces


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
    assert detokenizer.text == shown + "\ufffd"


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
