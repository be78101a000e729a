from __future__ import annotations

import json
import unicodedata
from itertools import pairwise
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import TokenizerError
from quire.text import Tokenizer

WORDS = [
    "hello",
    " there",
    " the",
    "quick",
    "brown ",
    "dog",
    "return",
    "world",
    "o",
    "e",
    " ",
    "你好",
    "世",
    "é",
    "😀",
    "\n",
]


def changed(metadata: dict[str, Any], **values: Any) -> dict[str, Any]:
    """With tokenizer.ggml.* values replaced, or left out where None."""
    new = metadata | {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return {key: value for key, value in new.items() if value is not None}


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(t) for t in tokenizer.encode(text)]


def sentencepiece_oracle(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece's BPE as it is defined: join the neighbours of the best score, leftmost first; spell the rest."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    pieces = list(("▁" + text).replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joins:
            break
        _, i = min(joins)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [t for p in pieces for t in ([p] if p in scores else [f"<0x{b:02X}>" for b in p.encode()])]


@given(text=st.text(max_size=40))
def test_byte_level_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


@given(text=st.text(max_size=40))
def test_sentencepiece_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False)
    # SentencePiece writes a space as ▁, so the two become one.
    assert sentencepiece.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


@given(text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join))
def test_sentencepiece_merges_as_its_scores_say(
    sentencepiece: Tokenizer, sentencepiece_gguf: dict[str, Any], text: str
) -> None:
    assert tokens(sentencepiece, text) == ["<s>", *sentencepiece_oracle(text, sentencepiece_gguf)]


def test_cuts_of_equal_score_go_by_the_id_of_the_left_piece(sentencepiece_gguf: dict[str, Any]) -> None:
    metadata = changed(
        sentencepiece_gguf,
        tokens=["<unk>", "<s>", "</s>", "aa", "aaa", "a"],
        token_type=[2, 3, 3, 1, 1, 1],
        scores=[0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    )
    backend = Tokenizer.from_gguf(metadata, "x.gguf").backend
    assert json.loads(backend.to_str())["model"]["merges"] == [["a", "a"], ["aa", "a"], ["a", "aa"]]


def test_digits_stand_alone_under_smollm(byte_level: Tokenizer) -> None:
    assert tokens(byte_level, "in 2024") == ["in", "Ġ", "2", "0", "2", "4"]


def test_special_tokens_in_text_are_matched_whole(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert byte_level.encode("<|im_start|>hello<|im_end|>")[::2][0] == 1
    assert byte_level.encode("<|im_start|>hello<|im_end|>")[-1] == 2
    assert tokens(byte_level, "a<tool>b") == ["a", "<tool>", "b"]
    assert tokens(sentencepiece, "hello</s>hello[INST]") == ["<s>", "▁hello", "</s>", "▁hello", "[INST]"]


def test_user_defined_tokens_are_shown_and_control_tokens_skipped(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<tool>b<|im_end|>")
    assert byte_level.decode(ids) == "a<tool>b"
    assert byte_level.special_token_ids == {0, 1, 2}


def test_control_words_never_come_from_merging(byte_level_gguf: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_gguf, "x.gguf")
    assert tokenizer.special_token_ids.isdisjoint(tokenizer.encode("<|im_start |> < |im_end|>"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [1]),
        ({"add_bos_token": False}, []),
        ({"add_eos_token": True}, [1, 2]),
        ({"add_bos_token": False, "add_eos_token": True}, [2]),
    ],
)
def test_sentencepiece_adds_bos_unless_told_otherwise(
    sentencepiece_gguf: dict[str, Any], flags: dict[str, bool], expected: list[int]
) -> None:
    tokenizer = Tokenizer.from_gguf(changed(sentencepiece_gguf, **flags), "x.gguf")
    assert tokenizer.encode("") == expected
    assert [t for t in tokenizer.encode("hello") if t in (1, 2)] == expected
    assert tokenizer.encode("", add_special_tokens=False) == []


@pytest.mark.parametrize(("pre", "expected"), [("smollm", []), ("qwen2", []), ("llama-bpe", [1]), ("tekken", [1])])
def test_byte_level_adds_bos_where_its_family_does(
    byte_level_gguf: dict[str, Any], pre: str, expected: list[int]
) -> None:
    tokenizer = Tokenizer.from_gguf(changed(byte_level_gguf, pre=pre, add_bos_token=None), "x.gguf")
    assert tokenizer.encode("") == expected


def test_a_vocabulary_without_space_prefix(sentencepiece_gguf: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(changed(sentencepiece_gguf, add_space_prefix=False), "x.gguf")
    assert tokens(tokenizer, " hello")[1:] == ["▁hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_qwen2_composes_characters_first(byte_level_gguf: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(changed(byte_level_gguf, pre="qwen2"), "x.gguf")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == unicodedata.normalize("NFC", "e\u0301")


def test_llama3_takes_a_word_that_is_a_token_whatever_the_merges_say(byte_level_gguf: dict[str, Any]) -> None:
    metadata = changed(
        byte_level_gguf,
        pre="llama-bpe",
        tokens=[*byte_level_gguf["tokenizer.ggml.tokens"], "zqzq"],
        token_type=[*byte_level_gguf["tokenizer.ggml.token_type"], 1],
    )
    assert tokens(Tokenizer.from_gguf(metadata, "x.gguf"), "zqzq") == ["zqzq"]
    assert tokens(Tokenizer.from_gguf(changed(metadata, pre="qwen2"), "x.gguf"), "zqzq") == list("zqzq")


def test_arrays_serve_as_lists(sentencepiece_gguf: dict[str, Any], sentencepiece: Tokenizer) -> None:
    metadata = changed(
        sentencepiece_gguf,
        scores=numpy.array(sentencepiece_gguf["tokenizer.ggml.scores"], dtype=numpy.float32),
        token_type=numpy.array(sentencepiece_gguf["tokenizer.ggml.token_type"], dtype=numpy.int32),
    )
    assert Tokenizer.from_gguf(metadata, "x.gguf").encode("hello 😀") == sentencepiece.encode("hello 😀")


def test_end_tokens_are_those_named_and_those_known(byte_level_gguf: dict[str, Any]) -> None:
    tool = len(byte_level_gguf["tokenizer.ggml.tokens"]) - 1
    tokenizer = Tokenizer.from_gguf(changed(byte_level_gguf, eot_token_id=tool), "x.gguf")
    assert tokenizer.end_token_ids == {0, 2, tool}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": None}, r"x\.gguf: no vocabulary"),
        ({"merges": None}, r"x\.gguf: no tokenizer\.ggml\.merges"),
        ({"model": "bert"}, r"x\.gguf: tokenizer\.ggml\.model is 'bert'.*'gpt2' and 'llama'"),
        ({"pre": "unheard-of"}, r"x\.gguf: tokenizer\.ggml\.pre is 'unheard-of'"),
        ({"token_type": [1, 2]}, r"x\.gguf: tokenizer\.ggml\.token_type has 2 entries for \d+ tokens"),
        ({"merges": ["nowhere tobefound"]}, r"x\.gguf: tokens and merges do not fit together"),
        ({"merges": ["onlyone"]}, r"x\.gguf: tokens and merges do not fit together"),
        ({"eos_token_id": 10**6}, r"x\.gguf: tokenizer\.ggml\.eos_token_id is 1000000, the vocabulary has \d+ tokens"),
    ],
)
def test_broken_vocabularies_are_refused(byte_level_gguf: dict[str, Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(changed(byte_level_gguf, **values), "x.gguf")


def test_sentencepiece_needs_scores(sentencepiece_gguf: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match=r"x\.gguf: no tokenizer\.ggml\.scores"):
        Tokenizer.from_gguf(changed(sentencepiece_gguf, scores=None), "x.gguf")
