from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from observing_fakes import INFO

from quire.beams import BeamSearchParams
from quire.errors import BadRequestError
from quire.params import OutputKind, SamplingParams
from quire.server.errors import ApiError
from quire.server.protocol import ChatBody, CompletionBody, Message, ResponseFormat, StreamOptions
from quire.server.sampling import chat_params, completion_params, priority_of

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=50, repetition_penalty=1.1)
MESSAGES = [Message(role="user", content="hi")]


def completion(**fields: Any) -> Any:
    return completion_params(CompletionBody(**({"prompt": "x"} | fields)), DEFAULTS)


def chat(**fields: Any) -> Any:
    return chat_params(ChatBody(messages=MESSAGES, **fields), DEFAULTS)


def test_what_is_left_out_is_the_models_default() -> None:
    params = completion()
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 50, 1.1)
    assert params.max_tokens == 16
    assert chat().max_tokens is None


def test_every_sampling_field_arrives() -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "stop": ["a", "b"],
        "seed": 5,
        "min_tokens": 3,
        "stop_token_ids": (9,),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "allowed_token_ids": array("i", [1, 2]),
        "bad_words": ["no"],
        "deterministic": True,
    }
    params = completion(**fields, logit_bias={"4": 1.0}, max_tokens=9)
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {4: 1.0}


def test_long_lists_are_for_few_prompts() -> None:
    allowed = list(range(2**15))
    completion(prompt=["a"] * 32, allowed_token_ids=allowed)
    completion(prompt=[7] * 33, allowed_token_ids=allowed)  # one prompt, of tokens
    with pytest.raises(ApiError, match="at most 32 prompts") as refused:
        completion(prompt=["a"] * 33, allowed_token_ids=allowed)
    assert (refused.value.status, refused.value.param) == (400, "allowed_token_ids")
    with pytest.raises(ApiError, match="at most 81 prompts"):
        completion(prompt=["a"] * 82, bad_words=["n" * 128] * 100)


def test_only_a_stream_wants_deltas() -> None:
    assert completion(stream=True).output_kind is OutputKind.DELTA
    assert chat().output_kind is OutputKind.FINAL_ONLY


def test_echo_brings_the_prompts_logprobs() -> None:
    assert completion(echo=True, logprobs=3).prompt_logprobs == 3
    assert completion(echo=True).prompt_logprobs is None
    assert completion(logprobs=3).prompt_logprobs is None
    assert completion(echo=True, max_tokens=0).max_tokens == 1


def test_chats_ask_for_logprobs_in_two_fields() -> None:
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False).logprobs is None


def test_both_names_of_the_length() -> None:
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5


@pytest.mark.parametrize(
    ("make", "fields", "param"),
    [
        (completion, {"max_tokens": 0}, "max_tokens"),
        (completion, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        (completion, {"best_of": 2}, "best_of"),
        (completion, {"best_of": 1, "n": 2}, "best_of"),
        (completion, {"stream_options": StreamOptions()}, "stream_options"),
        (completion, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (
            completion,
            {"stream": True, "stream_options": StreamOptions(include_obfuscation=True)},
            "stream_options.include_obfuscation",
        ),
        (completion, {"logit_bias": {"x": 1.0}}, "logit_bias"),
        (completion, {"min_tokens": 20}, "min_tokens"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ],
)
def test_contradictions_are_refused_by_name(make: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises((ApiError, BadRequestError)) as caught:
        make(**fields)
    assert caught.value.param == param


def test_arguments_for_plugins_arrive() -> None:
    assert completion(vllm_xargs={"force": 3}).extra_args == {"force": 3}
    assert chat().extra_args is None


def test_best_of_that_means_nothing_is_taken() -> None:
    assert completion(best_of=1).n == 1
    assert completion(best_of=3, n=3).n == 3


def test_beams() -> None:
    params = completion(use_beam_search=True, n=3, best_of=5, length_penalty=0.5, early_stopping="never", logprobs=0)
    assert isinstance(params, BeamSearchParams)
    # The model's defaults are for sampling.
    assert (params.beam_width, params.max_tokens, params.temperature) == (5, 16, 0.0)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")
    fields = {"temperature": 0.7, "stop_token_ids": [4], "ignore_eos": True, "include_stop_str_in_output": True}
    params = chat(use_beam_search=True, n=2, max_tokens=9, **fields)
    assert isinstance(params, BeamSearchParams)
    assert {name: getattr(params, name) for name in fields} == fields and params.beam_width == 2


@pytest.mark.parametrize(
    ("make", "fields", "param"),
    [
        (completion, {"stream": True}, "stream"),
        (completion, {"n": 4, "best_of": 2}, "best_of"),
        (completion, {"best_of": 1000}, "beam_width"),
        (completion, {"logprobs": 2}, "logprobs"),
        (completion, {"echo": True}, "echo"),
        (completion, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (completion, {"max_tokens": 0}, "max_tokens"),
        (completion, {"top_p": 0.5}, "top_p"),
        (completion, {"presence_penalty": 1.0}, "presence_penalty"),
        (completion, {"stop": "x"}, "stop"),
        (completion, {"seed": 1}, "seed"),
        (completion, {"cache_prompt": False}, "cache_prompt"),
        (completion, {"guided_choice": ["a", "b"]}, "guided_choice"),
        (completion, {"response_format": ResponseFormat(type="json_object")}, "response_format"),
        (completion, {"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        (chat, {"use_beam_search": None, "early_stopping": True}, "early_stopping"),
        (chat, {"max_tokens": None}, "max_tokens"),
        (chat, {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        (chat, {"max_tokens": 5, "logit_bias": {"1": 1.0}}, "logit_bias"),
    ],
)
def test_what_makes_no_sense_with_beams_is_refused_by_name(make: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises((ApiError, BadRequestError)) as caught:
        make(**{"use_beam_search": True, **fields})
    assert caught.value.param == param


def test_a_priority_is_refused_where_it_would_mean_nothing() -> None:
    body = CompletionBody(prompt="x", priority=3)
    assert priority_of(body, replace(INFO, scheduling_policy="priority")) == 3
    with pytest.raises(ApiError, match="scheduling-policy fcfs") as refused:
        priority_of(body, replace(INFO, scheduling_policy="fcfs"))
    assert refused.value.param == "priority"
