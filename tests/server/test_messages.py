"""Anthropic's Messages API, with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from server_harness import ScriptedEngine, Server, running

from quire.server.errors import ApiError
from quire.server.messages import MessagesBody, MessageTranslation, _chat
from quire.server.settings import ApiKey

USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with running(ScriptedEngine(tiny_model), api_keys=(ApiKey("ann", "secret"),)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def chat_of(**fields: Any) -> dict[str, Any]:
    return _chat(msgspec.convert({"max_tokens": 9, "messages": [USER]} | fields, MessagesBody), thinks=True)


def test_an_answer_and_its_stream_are_the_same(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": [USER], "system": [{"type": "text", "text": "Be."}]}
    whole = client.messages.create(**asked)
    assert whole.type == "message" and whole.role == "assistant" and whole.model == "tiny"
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert streamed.usage.input_tokens + (streamed.usage.cache_read_input_tokens or 0) == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )
    assert streamed.stop_reason == "max_tokens" and streamed.usage.output_tokens == 12
    shown = [kind for kind in kinds if kind != "text"]  # the client's own
    assert shown[0] == "message_start" and shown[-1] == "message_stop"


def test_a_model_that_never_thinks_takes_any_wish_to_think(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(model="tiny", max_tokens=4, messages=[USER], thinking=thinking)  # type: ignore[list-item]
    assert [block.type for block in whole.content] == ["text"]


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="tiny", max_tokens=64, messages=[USER], stop_sequences=["token"])  # type: ignore[list-item]
    assert whole.stop_reason == "stop_sequence" and whole.stop_sequence == "token"


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    few = client.messages.count_tokens(model="tiny", messages=[USER])  # type: ignore[list-item]
    whole = client.messages.create(model="tiny", max_tokens=1, messages=[USER])  # type: ignore[list-item]
    assert few.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_errors_have_anthropics_shape(client: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=[USER])  # type: ignore[list-item]
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(model="tiny", max_tokens=0, messages=[USER])  # type: ignore[list-item]
    assert wrong.value.body["type"] == "error" and "max_tokens" in wrong.value.message  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(model="tiny", max_tokens=5_000, messages=[USER])  # type: ignore[list-item]
    with pytest.raises(anthropic.BadRequestError, match="and max_tokens asks for 5000 more"):  # not as a chat has it
        client.messages.create(model="tiny", max_tokens=5_000, messages=[USER])  # type: ignore[list-item]
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(
            model="tiny",
            max_tokens=1,
            messages=[USER],  # type: ignore[list-item]
        )


def test_a_conversation_with_tools_becomes_a_chat() -> None:
    chat = chat_of(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        tools=[{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}}
    assert chat["messages"] == [
        {"role": "system", "content": "a\nb"},
        USER,
        {"role": "assistant", "reasoning": "hm", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "found"},
        {"role": "user", "content": "and?"},
    ]
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert chat["tool_choice"] == "required" and chat["parallel_tool_calls"] is False


def test_choices_of_tools_and_thinking() -> None:
    tools = [{"name": "look", "input_schema": {}}]
    named = chat_of(tools=tools, tool_choice={"type": "tool", "name": "look"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert chat_of(tools=tools, tool_choice={"type": "none"})["tool_choice"] == "none"
    assert chat_of(tool_choice={"type": "any"})["tool_choice"] == "required"  # so that the chat can refuse it
    assert "tool_choice" not in chat_of(tool_choice={"type": "auto"})
    assert chat_of(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    thinking = {"type": "enabled", "budget_tokens": 50}
    assert chat_of(thinking=thinking)["thinking_token_budget"] == 50
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert "context_management" not in chat_of(context_management=kept)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool"}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"output_config": {"format": {}}},
        {"mcp_servers": [{}]},
        {"unknown": 1},
    ],
)
def test_what_is_not_here_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ApiError, msgspec.ValidationError)):
        chat_of(**fields)


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "stop_reason": None}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage}


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments, **more.pop("function", {})}, **more}


def test_blocks_open_and_close_one_after_another() -> None:
    translation = MessageTranslation()
    events: list[bytes] = []
    for each in (
        chunk({"role": "assistant", "reasoning": "h"}),
        chunk({"reasoning": "m"}),
        chunk({"content": "I "}),
        chunk({"tool_calls": [call(0, "", id="t1", function={"name": "look"})]}),
        chunk({"tool_calls": [call(0, '{"x"')]}),
        chunk({"tool_calls": [call(0, ":1}"), call(1, "{}", id="t2", function={"name": "go"})]}),
        chunk({}, "tool_calls"),
    ):
        events += translation.chunk(each)
    events += translation.ending()
    told = [json.loads(each.split(b"data: ", 1)[1]) for each in events]
    starts = [one["content_block"]["type"] for one in told if one["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    order = [(one["type"].removeprefix("content_block_"), one["index"]) for one in told if "index" in one]
    open_now: int | None = None
    for kind, index in order:
        if kind == "start":
            assert open_now is None
            open_now = index
        assert open_now == index
        if kind == "stop":
            open_now = None
    assert open_now is None
    pieces = [one["delta"]["partial_json"] for one in told if one.get("delta", {}).get("type") == "input_json_delta"]
    assert pieces == ['{"x"', ":1}", "{}"]
    assert told[-2]["delta"]["stop_reason"] == "tool_use" and told[-1]["type"] == "message_stop"
    assert told[0]["message"]["usage"] == {
        "input_tokens": 5,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0,
    }


def test_a_call_ends_before_the_text_that_came_with_its_end() -> None:
    translation = MessageTranslation()
    events: list[bytes] = []
    for each in (
        chunk({"tool_calls": [call(0, '{"x"', id="t1", function={"name": "look"})]}),
        chunk({"content": "Done", "tool_calls": [call(0, ":1}")]}, "tool_calls"),
    ):
        events += translation.chunk(each)
    told = [json.loads(each.split(b"data: ", 1)[1]) for each in [*events, *translation.ending()]]
    deltas = [(one["index"], one["delta"]["type"]) for one in told if one["type"] == "content_block_delta"]
    assert deltas == [(0, "input_json_delta"), (0, "input_json_delta"), (1, "text_delta")]


def test_an_error_in_a_stream_ends_it() -> None:
    translation = MessageTranslation()
    (told,) = translation.chunk({"error": {"message": "gone", "type": "server_error"}})
    assert told.startswith(b"event: error\n") and not translation.ending()
