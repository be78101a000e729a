from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from quire.outputs import Logprob
from quire.server.logprobs import TextOffsets, TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from quire.text import Tokenizer

T = TypeVar("T")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_model)


def test_offsets_point_into_the_text(tokenizer: Tokenizer) -> None:
    text = "aü世b"
    ids = tokenizer.encode(text)
    offsets = TextOffsets(tokenizer, skip_special_tokens=True)
    assert [offsets.next(token) for token in ids] == [0, 1, 1, 2, 2, 2, 3]


def test_special_tokens_take_room_only_where_they_are_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|end|>a")
    assert ids[0] in tokenizer.special_token_ids
    for skip, second in ((True, 0), (False, len("<|end|>"))):
        offsets = TextOffsets(tokenizer, skip_special_tokens=skip)
        assert [offsets.next(token) for token in ids] == [0, second]


def as_sent(shown: T) -> T:
    return msgspec.json.decode(msgspec.json.encode(shown), type=type(shown))


def test_parts_of_characters_have_names_of_their_own(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("ü")
    names = TokenNames(tokenizer, as_ids=False)
    assert (names.text(first), names.text(second)) == ("bytes:\\xc3", "bytes:\\xbc")
    assert names.bytes(first) == [0xC3]
    assert TokenNames(tokenizer, as_ids=True).text(7) == "token_id:7"
    assert TokenNames(None, as_ids=False).text(7) == "token_id:7"


def test_completions_show_the_top_and_the_token_itself(tokenizer: Tokenizer) -> None:
    a, b, c = tokenizer.encode("abc")
    entry = {c: Logprob(-3.0, 9), a: Logprob(-0.5, 1), b: Logprob(-1.0, 2)}
    shown = as_sent(
        completion_logprobs(
            [a, c],
            [None, entry],
            num_top=2,
            names=TokenNames(tokenizer, as_ids=False),
            offsets=TextOffsets(tokenizer, skip_special_tokens=True),
        )
    )
    assert shown.tokens == ["a", "c"]
    assert shown.token_logprobs == [None, -3.0]
    assert shown.top_logprobs == [None, {"a": -0.5, "b": -1.0, "c": -3.0}]
    assert shown.text_offset == [0, 1]


def test_chats_show_as_many_as_were_asked_for(tokenizer: Tokenizer) -> None:
    a, b, c = tokenizer.encode("abc")
    entry = {c: Logprob(-math.inf, 9), a: Logprob(-0.5, 1), b: Logprob(-1.0, 2)}
    names = TokenNames(tokenizer, as_ids=False)
    (shown,) = as_sent(chat_logprobs([c], [entry], num_top=1, names=names)).content
    assert (shown.token, shown.logprob, shown.bytes) == ("c", -9999.0, [ord("c")])
    assert [(top.token, top.logprob) for top in shown.top_logprobs] == [("a", -0.5)]
    assert as_sent(chat_logprobs([c], [entry], num_top=0, names=names)).content[0].top_logprobs == []


def test_prompt_logprobs_are_by_token_id() -> None:
    shown = as_sent(prompt_logprobs([None, {7: Logprob(-1.0, 1, "x")}]))
    assert shown == [None, {"7": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}]
