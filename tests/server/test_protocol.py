from __future__ import annotations

import importlib
import json
from typing import Any, get_type_hints

import pytest

from quire.refusals import FIELDS
from quire.server.errors import ApiError
from quire.server.protocol import (
    NO_EFFECT,
    BodyDecoder,
    ChatBody,
    CompletionBody,
    FieldState,
    TokenizeBody,
    check_shape,
    field_states,
    refused_fields,
)
from quire.server.responses import ResponsesBody

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
TYPES = {ChatBody: CHAT, CompletionBody: COMPLETION, TokenizeBody: COMPLETION}


def decode(type_: Any, body: dict[str, Any]) -> Any:
    return BodyDecoder(type_).decode(json.dumps(body).encode())


@pytest.mark.parametrize("type_", TYPES)
def test_what_means_nothing_is_taken_and_the_rest_is_refused_by_name(type_: Any) -> None:
    for name in refused_fields(type_):
        for value in FIELDS[name].taken:
            decode(type_, TYPES[type_] | {name: value})
        for value in ("other", 7, True, {"type": "json_object"}, [1]):
            if FIELDS[name].takes(value):
                continue
            with pytest.raises(ApiError, match="not supported") as caught:
                decode(type_, TYPES[type_] | {name: value})
            assert (caught.value.status, caught.value.param) == (400, name)


def test_every_rule_is_of_a_field_that_exists() -> None:
    assert set(FIELDS) == {name for type_ in TYPES for name in refused_fields(type_)}
    fields = {name for type_ in TYPES for name, state in field_states(type_).items() if state is FieldState.NO_EFFECT}
    assert set(NO_EFFECT) == fields


@pytest.mark.parametrize(("module", "type_"), [("chat.completion", ChatBody), ("completion", CompletionBody)])
def test_every_field_of_openais_client_is_served_or_says_why_not(module: str, type_: Any) -> None:
    params = importlib.import_module(f"openai.types.{module}_create_params")
    fields = set(get_type_hints(params.CompletionCreateParamsBase)) | {"stream"}
    assert fields <= set(field_states(type_))


def test_a_refused_fields_value_is_let_go_of() -> None:
    """It would be a view of the whole body, for as long as the answer takes."""
    body = decode(ChatBody, CHAT | {"tools": [{"a": "b" * 1000}], "tool_choice": "none", "store": False})
    assert all(getattr(body, name) is None for name in refused_fields(ChatBody))


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        (json.dumps({"prompt": '[{",:\\' * 200_000}), True),
        (json.dumps({"prompt": ["a, b: [c]" * 10] * 2048}), True),
        (json.dumps({"prompt": [50_000] * 290_000}), True),
        (json.dumps({"prompt": [1] * 700_000}), False),
        (json.dumps({"prompt": [[1]] * 40_000}), False),
        (json.dumps({"prompt": [""] * 200_000}), False),
        (json.dumps({"metadata": {str(i): "" for i in range(40_000)}}), False),
    ],
    ids=["text", "prompts", "ids", "short ids", "lists", "texts", "fields"],
)
def test_bodies_of_too_many_parts_are_refused_before_they_are_decoded(body: str, is_taken: bool) -> None:
    if is_taken:
        return check_shape(body.encode())
    with pytest.raises(ApiError, match="too many parts") as refused:
        check_shape(body.encode())
    assert (refused.value.status, refused.value.code) == (400, "too_many_parts")
    return None


@pytest.mark.parametrize(
    ("type_", "change", "param"),
    [
        (CompletionBody, {"prompt": None}, "prompt"),
        (CompletionBody, {"prompt": []}, "prompt"),
        (CompletionBody, {"prompt": [[]]}, "prompt[0]"),
        (CompletionBody, {"prompt": [True]}, "prompt[0]"),
        (CompletionBody, {"prompt": [-1]}, "prompt[0]"),
        (CompletionBody, {"max_tokens": "5"}, "max_tokens"),
        (CompletionBody, {"max_tokens": 1.5}, "max_tokens"),
        (CompletionBody, {"max_tokens": -1}, "max_tokens"),
        (CompletionBody, {"n": 0}, "n"),
        (CompletionBody, {"n": 10**9}, "n"),
        (CompletionBody, {"temperature": -0.1}, "temperature"),
        (CompletionBody, {"top_p": 0}, "top_p"),
        (CompletionBody, {"top_k": 10**30}, "top_k"),
        (CompletionBody, {"stop": [""]}, "stop[0]"),
        (CompletionBody, {"stop": ["n" * 257]}, "stop[0]"),
        (CompletionBody, {"bad_words": ["n"] * 1001}, "bad_words"),
        (CompletionBody, {"bad_words": ["n" * 129]}, "bad_words[0]"),
        (CompletionBody, {"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        (CompletionBody, {"allowed_token_ids": [1] * (2**18 + 1)}, "allowed_token_ids"),
        (CompletionBody, {"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
        (CompletionBody, {"priority": -(2**31) - 1}, "priority"),
        (CompletionBody, {"logprobs": 21}, "logprobs"),
        (CompletionBody, {"logprobs": True}, "logprobs"),
        (CompletionBody, {"stream": "yes"}, "stream"),
        (CompletionBody, {"stream_options": {"usage": True}}, "stream_options.usage"),
        (CompletionBody, {"cache_salt": ""}, "cache_salt"),
        (CompletionBody, {"cache_salt": "s" * 1025}, "cache_salt"),
        (CompletionBody, {"timeout": 0}, "timeout"),
        (CompletionBody, {"messages": []}, "messages"),
        (ChatBody, {"messages": []}, "messages"),
        (ChatBody, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (ChatBody, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (ChatBody, {"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
        (ChatBody, {"logprobs": 3}, "logprobs"),
        (ChatBody, {"prompt": "x"}, "prompt"),
        (ChatBody, {"max_tokens": 0}, "max_tokens"),
        (ChatBody, {"frobnicate": 1}, "frobnicate"),
    ],
)
def test_wrong_values_are_refused_by_name(type_: Any, change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(type_, TYPES[type_] | change)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split(".")[-1] in caught.value.message


@pytest.mark.parametrize(
    ("type_", "change", "ending"),
    [
        (ChatBody, {"reasoning_effort": "x"}, "'x': it must be one of high, low, max, medium, minimal, none, xhigh"),
        (ResponsesBody, {"input": "x", "tools": [{"type": "web_search"}]}, "'web_search': it must be function"),
        (ResponsesBody, {"input": [{"role": "x"}]}, "'x': it must be one of assistant, developer, system, user"),
        (ResponsesBody, {"input": "x", "tool_choice": "any"}, "'any': it must be one of auto, none, required"),
    ],
)
def test_what_a_field_takes_is_told(type_: Any, change: dict[str, Any], ending: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(type_, TYPES.get(type_, {}) | change)
    assert caught.value.message.endswith(ending), caught.value.message


def test_null_means_not_given() -> None:
    for type_, least in TYPES.items():
        names = [name for name in type_.__struct_fields__ if name not in least]
        decode(type_, least | dict.fromkeys(names))


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    decode(ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, answer]})


def test_nesting_without_end_is_a_400() -> None:
    deep = b'{"prompt":"x","response_format":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ApiError) as caught:
        BodyDecoder(CompletionBody).decode(deep)
    assert caught.value.status == 400
