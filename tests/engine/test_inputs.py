"""From what a user hands in to a checked request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.inputs import InputProcessor
from quire.errors import BadRequestError, ConfigError, ContextLengthError
from quire.params import SamplingParams
from quire.request import Request, cache_scope
from quire.text import Tokenizer

EOS = 7


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_model)


def make(tokenizer: Tokenizer | None = None, **limits: Any) -> InputProcessor:
    values: dict[str, Any] = {"vocab_size": 320, "max_model_len": 100, "max_num_seqs": 8, "seed": 0}
    return InputProcessor(tokenizer, eos_token_ids=frozenset([EOS]), **values | limits)


def request_of(inputs: InputProcessor, prompt: Any = (1, 2, 3), **params: Any) -> Request:
    return inputs.make_request("id", prompt, SamplingParams(**params), arrival_s=0.0).request


def test_text_ids_and_dicts_are_prompts(tokenizer: Tokenizer) -> None:
    inputs, ids = make(tokenizer), tokenizer.encode("hello")
    for prompt, text in [
        ("hello", "hello"),
        (ids, None),
        ({"prompt": "hello"}, "hello"),
        ({"prompt_token_ids": ids}, None),
        ({"prompt": "shown", "prompt_token_ids": ids}, "shown"),  # the ids run, the text is what they were made from
    ]:
        prepared = inputs.make_request("id", prompt, SamplingParams(), arrival_s=1.5)  # type: ignore[arg-type]
        assert (prepared.request.prompt_token_ids, prepared.prompt) == (ids, text)
        assert (prepared.num_prompt_tokens, prepared.request.arrival_s) == (len(ids), 1.5)


def test_the_answer_gets_the_room_that_is_left() -> None:
    assert request_of(make(), [1] * 90, max_tokens=5).max_tokens == 5
    assert request_of(make(), [1] * 90, max_tokens=50).max_tokens == 10
    assert request_of(make(), [1] * 90, max_tokens=None).max_tokens == 10
    assert request_of(make(), [1] * 99, max_tokens=None).max_tokens == 1
    with pytest.raises(ContextLengthError, match=r"maximum context length is 100 tokens.*the prompt has 100"):
        request_of(make(), [1] * 100)


def test_so_many_sequences_as_run_at_once() -> None:
    assert request_of(make(), n=8).n == 8
    with pytest.raises(BadRequestError, match="at most max_num_seqs=8") as refused:
        request_of(make(), n=10**9)
    assert refused.value.param == "n"
    assert request_of(make(max_num_seqs=None), n=9).n == 9


def test_what_ends_a_sequence() -> None:
    plain = request_of(make(), stop_token_ids=[3])
    assert (plain.end_token_ids, plain.eos_token_ids) == ({3, EOS}, {EOS})
    named = request_of(make(), stop_token_ids=[EOS])
    assert (named.end_token_ids, named.eos_token_ids) == ({EOS}, set())  # it is told as the stop_reason
    assert request_of(make(), ignore_eos=True, stop_token_ids=[3]).end_token_ids == {3}
    assert plain.spec.end_token_ids == (3, EOS)


def test_seeds_repeat_with_the_engines_and_are_kept_where_given() -> None:
    first, second = make(), make()
    seeds = [request_of(first).spec.seed for _ in range(3)]
    assert len(set(seeds)) == 3 and seeds == [request_of(second).spec.seed for _ in range(3)]
    assert request_of(make(), seed=5).spec.seed == 5
    assert request_of(make(), seed=-2).spec.seed == 2**64 - 2


def test_whose_cached_prefixes_it_finds() -> None:
    inputs, params = make(), SamplingParams()
    given = {"prompt_token_ids": [1], "cache_salt": "s"}
    shared = inputs.make_request("id", given, params, arrival_s=0, tenant="t").request  # type: ignore[arg-type]
    own = inputs.make_request("id", given, params, arrival_s=0, tenant="t", cache_tenant="t").request  # type: ignore[arg-type]
    assert (shared.tenant, shared.salt, own.salt) == ("t", cache_scope("s"), cache_scope("s", "t"))
    assert request_of(inputs).salt is None
    assert not request_of(inputs).skip_prefix_cache_read
    assert request_of(inputs, prompt_logprobs=1).skip_prefix_cache_read
    assert request_of(inputs, skip_reading_prefix_cache=True).skip_prefix_cache_read


def test_bad_words_become_ids_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, asked = make(tokenizer), []
    phrases = tokenizer.ids_for_phrase
    monkeypatch.setattr(tokenizer, "ids_for_phrase", lambda word: asked.append(word) or phrases(word))
    words = request_of(inputs, bad_words=["ab"]).spec.bad_words
    assert words and request_of(inputs, bad_words=["ab"]).spec.bad_words is words
    assert asked == ["ab"]


def test_without_a_tokenizer_text_is_refused() -> None:
    for params in ({"stop": ["x"]}, {"bad_words": ["x"]}):
        with pytest.raises(BadRequestError, match="needs a tokenizer"):
            request_of(make(), **params)
    with pytest.raises(BadRequestError, match="give prompt_token_ids"):
        request_of(make(), "text")


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([True], {}, "prompt"),
        ([320], {}, "prompt"),
        ({"prompt_token_ids": [1], "cache_salt": ""}, {}, "cache_salt"),
        ([1], {"allowed_token_ids": [320]}, "allowed_token_ids"),
        ([1], {"logit_bias": {320: 1.0}}, "logit_bias"),
        ([1], {"prompt_logprobs": 321}, "prompt_logprobs"),
        ([1], {"min_tokens": 1, "allowed_token_ids": [EOS]}, "allowed_token_ids"),
    ],
)
def test_refusals_name_the_field(prompt: Any, params: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        request_of(make(), prompt, **params)
    assert refused.value.param == param


def test_pinned_prefixes_fill_a_block(tokenizer: Tokenizer) -> None:
    inputs = make(tokenizer)
    assert inputs.encode_pinned(["hello", (1, 2, 3, 4)], 4) == [tokenizer.encode("hello"), [1, 2, 3, 4]]
    with pytest.raises(ConfigError, match=r"pinned_prefixes\[1\] has 3 tokens"):
        inputs.encode_pinned([[1] * 4, [1] * 3], 4)
    with pytest.raises(BadRequestError, match=r"pinned_prefixes\[0\] holds 999"):
        inputs.encode_pinned([[999] * 4], 4)
