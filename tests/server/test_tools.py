"""Tools and thinking over HTTP, as the unmodified OpenAI client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import jsonschema
import openai
import pytest
from server_harness import ScriptedEngine, Server, real_engine, running

from quire.agents import checked_tools

TEMPLATE = (
    "{% if tools %}<|start|>system\n{{ tools | tojson }} in <tool_call></tool_call><|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
USER: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def model_with_tools(path: Path) -> Path:
    model = fakes.write_tiny_model(path, max_position_embeddings=1024)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_tools(tmp_path_factory.mktemp("tools"))


class Saying(ScriptedEngine):
    """Says one text, and ends."""

    def say(self, text: str) -> None:
        assert self.tokenizer is not None
        self.script = [*self.tokenizer.encode(text, add_special_tokens=False), 300]

    def prepare(self, request_id: str, prompt: Any, params: Any, **kwargs: Any) -> Any:
        return super().prepare(request_id, prompt, params.clone(stop_token_ids=[300]), **kwargs)


@pytest.fixture(scope="module")
def scripted(model: Path) -> Iterator[Server]:
    with running(Saying(model, max_model_len=1024)) as server:
        yield server


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[Server]:
    engine = real_engine(model, max_model_len=1024, kv_cache_memory_bytes=8 << 20)
    with running(engine, served_model_names=("tiny",)) as server:
        yield server


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def joined(chunks: Any) -> tuple[dict[str, Any], str | None]:
    """What a stream's deltas add up to."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reason = None
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(message["calls"]) and call.type == "function"
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return message, reason


def test_a_prompts_tokens_are_counted_with_its_tools(scripted: Server) -> None:
    body: dict[str, Any] = {"messages": USER, "tools": [TOOL]}
    (tool,) = checked_tools([TOOL])
    counted = scripted.post("/tokenize", body).json()["count"]
    asked = scripted.post("/v1/chat/completions", body | {"max_tokens": 1}).json()
    assert counted == asked["usage"]["prompt_tokens"] > scripted.post("/tokenize", {"messages": USER}).json()["count"]
    function = tool["function"]
    anthropics = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    counted_there = scripted.post("/v1/messages/count_tokens", {"messages": USER, "tools": [anthropics]}).json()
    assert counted_there == {"input_tokens": counted}


@pytest.mark.parametrize("text", [f"I look.\n{CALL}\n{CALL}", CALL])
def test_calls_whole_and_streamed(scripted: Server, text: str) -> None:
    scripted.engine.say(text)
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [TOOL, OTHER]}
    with client_of(scripted) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        message, reason = joined(client.chat.completions.create(**asked, stream=True))
    assert (whole.finish_reason, reason) == ("tool_calls", "tool_calls")
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert len(calls) == text.count("<tool_call>")
    assert len({call.id for call in whole.message.tool_calls or []}) == len(calls)
    assert all(json.loads(arguments) == {"city": "Rome", "days": 2} for _, arguments in calls)
    assert [tuple(call) for call in message["calls"]] == calls
    assert (whole.message.content or "") == message["content"] == text.partition(CALL)[0].strip()
    assert "get_weather" in scripted.engine.prepared[-1].prompt


def test_answers_go_back_in(scripted: Server) -> None:
    scripted.engine.say("Sunny.")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "25 degrees"},
    ]
    with client_of(scripted) as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "Sunny."
    assert answer.choices[0].finish_reason == "stop"
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in scripted.engine.prepared[-1].prompt


def test_tools_that_must_not_be_called_are_not_shown(scripted: Server) -> None:
    scripted.engine.say(CALL)
    reply = scripted.post("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "tool_choice": "none"})
    assert reply.json()["choices"][0]["message"]["content"] == CALL
    assert "get_weather" not in scripted.engine.prepared[-1].prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_forced_calls_fit_their_schema(real: Server, choice: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [TOOL], "tool_choice": choice}
    asked |= {"max_tokens": 300, "temperature": 1.0, "seed": 4, "parallel_tool_calls": False}
    with client_of(real) as client:
        if stream:
            message, reason = joined(client.chat.completions.create(**asked, stream=True))
            ((name, arguments),) = message["calls"]
        else:
            (one,) = client.chat.completions.create(**asked).choices
            (call,) = one.message.tool_calls or []
            name, arguments, reason = call.function.name, call.function.arguments, one.finish_reason
    assert (name, reason) == ("get_weather", "tool_calls")
    jsonschema.validate(json.loads(arguments), TOOL["function"]["parameters"])


def test_strict_tools_hold_wherever_the_model_calls_them(real: Server) -> None:
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    body = {"messages": USER, "tools": [strict], "max_tokens": 40, "temperature": 1.0, "seed": 1}
    reply = real.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    bad = {"type": "function", "function": TOOL["function"] | {"strict": True, "parameters": {"not": {}}}}
    reply = real.post("/v1/chat/completions", body | {"tools": [bad]})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "tools[0].function.parameters.not")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 3}}]}, "tools[0].function.x"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "all"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL] * 300}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "use_beam_search": True, "n": 2}, "tools"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
    ],
)
def test_what_is_wrong_is_named(scripted: Server, fields: dict[str, Any], param: str) -> None:
    reply = scripted.post("/v1/chat/completions", {"messages": USER, **fields})
    assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize("is_open", [True, False])
def test_thinking_is_told_apart(scripted: Server, is_open: bool) -> None:
    thought = "Hm, <b>hm</b>."
    scripted.engine.say(f"{'' if is_open else '<think>'}{thought}</think>\n\nYes.")
    asked: dict[str, Any] = {"model": "tiny", "messages": USER}
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": is_open}}
    with client_of(scripted) as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    message: Any = whole.choices[0].message
    assert (message.reasoning, message.reasoning_content, message.content) == (thought, thought, "Yes.")
    found, _ = joined(chunks)
    assert (found["reasoning"], found["content"]) == (thought, "Yes.")
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None and usage.completion_tokens_details is not None
        num_markers = len("</think>") + (0 if is_open else len("<think>"))
        assert usage.completion_tokens_details.reasoning_tokens == len(thought) + num_markers
    hidden = scripted.post(
        "/v1/chat/completions", {"messages": USER, "include_reasoning": False, **asked["extra_body"]}
    )
    assert "reasoning" not in hidden.json()["choices"][0]["message"]
    scripted.post("/v1/chat/completions", {"messages": USER, "reasoning_effort": "high"})
    assert scripted.engine.prepared[-1].prompt.endswith("<think>\n")
    scripted.post("/v1/chat/completions", {"messages": USER, "reasoning_effort": "none"})
    assert not scripted.engine.prepared[-1].prompt.endswith("<think>\n")
