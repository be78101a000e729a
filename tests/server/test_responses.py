"""OpenAI's Responses API, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from observing_fakes import eventually
from server_harness import ScriptedEngine, Server, running

from quire.server.errors import ApiError
from quire.server.response_events import ResponseTranslation
from quire.server.responses import Kept, ResponsesBody, ResponseStore, _chat, _messages
from quire.server.settings import ApiKey

KEYS = (ApiKey("ann", "key-a"), ApiKey("bob", "key-b"))


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with running(ScriptedEngine(tiny_model), api_keys=KEYS) as server:
        yield server


def client(server: Server, key: str = "key-a") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def chat_of(**fields: Any) -> dict[str, Any]:
    body = msgspec.convert({"input": "Hello"} | fields, ResponsesBody)
    return _chat(body, _messages(body.input))


def test_an_answer_and_its_stream_are_the_same(server: Server) -> None:
    ann = client(server)
    asked: Any = {"model": "tiny", "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 12}
    whole = ann.responses.create(**asked)
    assert whole.status == "incomplete" and whole.incomplete_details is not None and whole.usage is not None
    assert whole.usage.output_tokens == 12 and whole.output_text
    events = list(ann.responses.create(**asked, stream=True))
    streamed = events[-1].response
    assert streamed.output_text == whole.output_text and streamed.status == "incomplete"
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == list(range(len(numbers)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


def test_a_conversation_goes_on_from_what_was_said(server: Server) -> None:
    ann = client(server)
    first = ann.responses.create(model="tiny", input="One", max_output_tokens=16)
    second = ann.responses.create(model="tiny", input="Two", max_output_tokens=16, previous_response_id=first.id)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 16
    kept = server.context.responses.find(second.id, "ann").messages
    assert [message["role"] for message in kept] == ["user", "assistant", "user", "assistant"]
    assert kept[1]["content"] == first.output_text
    assert ann.responses.retrieve(first.id).output_text == first.output_text
    bob = client(server, "key-b")
    for ask in (
        lambda: bob.responses.retrieve(first.id),
        lambda: bob.responses.delete(first.id),
        lambda: bob.responses.create(model="tiny", input="x", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    ann.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(first.id)
    unkept = ann.responses.create(model="tiny", input="One", max_output_tokens=16, store=False)
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(unkept.id)


def test_one_runs_in_the_background_and_is_cancelled(server: Server) -> None:
    ann = client(server)
    done = ann.responses.create(model="tiny", input="One", max_output_tokens=16, background=True)
    assert done.status == "queued"
    eventually(lambda: ann.responses.retrieve(done.id).status != "queued")
    assert ann.responses.retrieve(done.id).status == "incomplete" and ann.responses.retrieve(done.id).output_text
    with pytest.raises(openai.ConflictError):
        ann.responses.cancel(done.id)
    server.engine.hangs_after = 3
    try:
        hung = ann.responses.create(model="tiny", input="One", max_output_tokens=16, background=True)
        assert ann.responses.cancel(hung.id).status == "cancelled"
        assert not server.engine.running
    finally:
        server.engine.hangs_after = None


def test_items_become_messages() -> None:
    chat = chat_of(
        instructions="Be.",
        tools=[{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}],
        tool_choice={"type": "function", "name": "look"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low"},
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "found"},
        ],
    )
    function = {"name": "look", "arguments": "{}"}
    assert chat["messages"] == [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": function},
            ],
            "reasoning": "hm",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ]
    look = {"name": "look", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": look}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert chat["reasoning_effort"] == "low"
    assert chat_of(input="x", tool_choice="required")["tool_choice"] == "required"  # so that the chat can refuse it


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user"}]},
        {"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"tools": [{"type": "web_search"}]},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        {"truncation": "auto"},
        {"conversation": "c"},
        {"unknown": 1},
    ],
)
def test_what_is_not_here_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ApiError, msgspec.ValidationError)):
        chat_of(**fields)


def test_thoughts_and_calls_are_items_of_their_own() -> None:
    done: list[Any] = []
    translation = ResponseTranslation({"id": "resp_1", "output": []}, lambda *both: done.append(both))
    deltas: list[dict[str, Any]] = [
        {"reasoning": "hm"},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "go", "arguments": "{}"}}]},
    ]
    events = []
    for delta in deltas:
        choice = {"delta": delta, "finish_reason": "tool_calls" if delta is deltas[-1] else None}
        events += translation.chunk({"choices": [choice]})
    events += translation.ending()
    told = [json.loads(each.split(b"data: ", 1)[1]) for each in events]
    opened = [one["item"]["type"] for one in told if one["type"] == "response.output_item.added"]
    assert opened == ["reasoning", "message", "function_call", "function_call"]
    assert [one["output_index"] for one in told if one["type"] == "response.output_item.done"] == [0, 1, 2, 3]
    ((response, items),) = done
    assert told[-1]["type"] == "response.completed" and told[-1]["response"] == response
    assert all(item["status"] == "completed" for item in response["output"])
    message = items.message()
    assert message["reasoning"] == "hm" and [call["id"] for call in message["tool_calls"]] == ["c1", "c2"]


def test_a_call_ends_before_the_text_that_came_with_its_end() -> None:
    translation = ResponseTranslation({"id": "resp_1", "output": []}, lambda *both: None)
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": "{"}}
    rest = {"content": "Done", "tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    for delta, reason in (({"tool_calls": [call]}, None), (rest, "tool_calls")):
        translation.chunk({"choices": [{"delta": delta, "finish_reason": reason}]})
    told = json.loads(translation.ending()[-1].split(b"data: ", 1)[1])
    output = told["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message"]
    assert output[0]["arguments"] == "{}" and output[1]["content"][0]["text"] == "Done"


def test_the_oldest_leave_when_the_bytes_are_used_up() -> None:
    store = ResponseStore(max_bytes=3_000)
    for number in range(10):
        store.keep(Kept("ann", {"id": f"resp_{number}"}, [{"role": "user", "content": "x" * 900}]))
    assert store.find("resp_9", "ann").response == {"id": "resp_9"}
    with pytest.raises(ApiError):
        store.find("resp_0", "ann")
    for number in range(10):
        store.forget(f"resp_{number}")
    assert store._num_bytes == 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_output_tokens": 10**6}, "max_output_tokens", "and max_output_tokens asks for 1000000 more"),
        ({"input": "word " * 5000}, "input", "maximum context length"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"reasoning": {"effort": "x"}}, "reasoning.effort", "reasoning.effort"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
            "text.format.schema.not",
            "text.format.schema.not",
        ),
    ],
)
def test_errors_name_the_fields_of_this_api(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client(server).responses.create(**{"model": "tiny", "input": "Hello"} | fields)
    assert caught.value.param == param
    assert words in str(caught.value), caught.value
