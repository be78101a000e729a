"""SamplingParams: checked once, at construction, with the field's name in every refusal."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import BadRequestError
from quire.params import OutputKind, SamplingParams, for_chat


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", 1.0),
        ("seed", 2**64),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", [3]),
        ("bad_words", [""]),
        ("bad_words", ["no"] * 1001),
        ("bad_words", ["n" * 129]),
        ("stop", ["no"] * 65),
        ("stop", "n" * 257),
        ("stop_token_ids", [1] * 1025),
        ("allowed_token_ids", [1] * (2**18 + 1)),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", [2**31]),
        ("logit_bias", dict.fromkeys(range(4097), 1)),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "ab"),
        ("allowed_token_ids", []),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("stop_token_ids", 5),
        ("bad_words", "no"),
        ("ignore_eos", "yes"),
        ("output_kind", "some"),
    ],
)
def test_refused_with_its_name(field: str, value: object) -> None:
    with pytest.raises(BadRequestError) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field
    assert field in str(refused.value)


def test_unknown_field() -> None:
    with pytest.raises(BadRequestError, match="best_off"):
        SamplingParams(best_off=2)  # type: ignore[call-arg]


def test_other_spellings_of_off() -> None:
    params = SamplingParams(top_k=-1, seed=-1)
    assert (params.top_k, params.seed) == (0, None)


def test_a_whole_vocabulary_is_held_compactly() -> None:
    allowed = SamplingParams(allowed_token_ids=list(range(2**18))).allowed_token_ids
    assert allowed is not None and sys.getsizeof(allowed) < 5 * 2**18
    assert list(allowed[-2:]) == [2**18 - 2, 2**18 - 1]


def test_normalised() -> None:
    params = SamplingParams(stop="END", stop_token_ids=(1, 2), logit_bias={"5": 1}, output_kind="delta")  # type: ignore[arg-type,dict-item]
    assert params.stop == ["END"]
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {5: 1.0}
    assert params.output_kind is OutputKind.DELTA


@pytest.mark.parametrize("number", [np.int64, np.int32, torch.tensor])
def test_numbers_of_numpy_and_tensors_become_pythons(number: Any) -> None:
    given = {
        "n": 2, "seed": 7, "max_tokens": 9, "min_tokens": 1, "top_k": 5, "logprobs": 3, "prompt_logprobs": 2,
        "temperature": 1, "top_p": 1, "min_p": 0, "presence_penalty": 1, "frequency_penalty": 1,
        "repetition_penalty": 1,
    }  # fmt: skip
    params = SamplingParams(**{name: number(value) for name, value in given.items()})
    for name, value in given.items():
        assert getattr(params, name) == value
        assert type(getattr(params, name)) is int, name
    rows = SamplingParams(
        stop_token_ids=torch.tensor([1, 2]),
        allowed_token_ids=[number(4), 5],
        logit_bias={number(3): np.float32(0.5)},
        bad_words=np.array(["no"]),
        stop=np.array(["end"]),
        temperature=np.float32(0.5),
        ignore_eos=np.True_,
    )
    assert rows == SamplingParams(
        stop_token_ids=[1, 2],
        allowed_token_ids=[4, 5],
        logit_bias={3: 0.5},
        bad_words=["no"],
        stop=["end"],
        temperature=0.5,
        ignore_eos=True,
    )
    assert {type(token) for token in (*rows.stop_token_ids, *rows.allowed_token_ids, *rows.logit_bias)} == {int}
    with pytest.raises(BadRequestError, match="max_tokens"):
        SamplingParams(max_tokens=np.array([1, 2]))  # type: ignore[arg-type]


def test_a_limit_is_named() -> None:
    with pytest.raises(BadRequestError, match="at most 1,000 words, and this has 1,001"):
        SamplingParams(bad_words=["no"] * 1001)
    SamplingParams(bad_words=["n" * 128] * 1000, stop=["n" * 256] * 64)


def test_equal_texts_are_refused() -> None:
    with pytest.raises(BadRequestError, match="equal texts"):
        SamplingParams(n=2, temperature=0.0)


def test_stop_needs_text() -> None:
    with pytest.raises(BadRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_clone_is_checked_again() -> None:
    params = SamplingParams(max_tokens=4)
    assert params.clone(max_tokens=8).max_tokens == 8
    assert params.max_tokens == 4
    with pytest.raises(BadRequestError):
        params.clone(top_p=2)


def test_for_chat_the_models_own_sampling_wins_over_a_sane_one() -> None:
    sane = for_chat(SamplingParams(max_tokens=99))
    assert (sane.temperature, sane.top_p, sane.max_tokens) == (0.7, 0.95, 99)
    for own in (SamplingParams(temperature=0.6), SamplingParams(top_k=64, top_p=0.95), SamplingParams(temperature=0)):
        assert for_chat(own) == own
