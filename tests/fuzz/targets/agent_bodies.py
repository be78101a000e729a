"""Requests of programs, whole: tools, schemas, the Responses and the Messages API, through the application and a real
engine on a tiny model. Every answer is one of the API's own, and none is the server's fault.

A changed byte would mostly end JSON's syntax. So an input is the seed of a body: a valid one whose parts are replaced,
moved and nested at random.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import json
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import fakes
from server_harness import make_context
from starlette.types import ASGIApp

from fuzz.harness import Target
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.log import get_logger
from quire.server.app import create_app

_TEMPLATE = (
    "{% if tools %}<|start|>system\n{{ tools | tojson }} in <tool_call></tool_call><|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": _CITY, "strict": True}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
_USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
_SCHEMAS: list[Any] = [
    _CITY,
    {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}},
    {"type": "object", "properties": {"a": {"enum": [1, "x", None]}, "b": {"type": "integer", "minimum": 3}}},
    {"type": "string", "pattern": "^[a-z]{2,5}$", "maxLength": 9},
    {"oneOf": [{"type": "number", "multipleOf": 0.5}, {"type": "string", "format": "date-time"}]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "allOf": [{}]},
]
_CHAT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_BODIES: list[tuple[str, dict[str, Any]]] = [
    (_CHAT, {"messages": [_USER], "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
    (_CHAT, {"messages": [_USER], "tools": [_TOOL], "tool_choice": "required", "stream": True}),
    (
        _CHAT,
        {"messages": [_USER], "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    (
        _CHAT,
        {
            "messages": [
                {"role": "developer", "content": "be"},
                _USER,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
            ],
            "tools": [_TOOL],
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "stream": True,
        },
    ),
    (
        _CHAT,
        {
            "messages": [_USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _CITY, "strict": True}},
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (_CHAT, {"messages": [_USER], "response_format": {"type": "json_object"}, "n": 2, "seed": 1}),
    (_CHAT, {"messages": [_USER], "structured_outputs": {"regex": "[ab]{1,3}c?"}, "thinking_token_budget": 4}),
    (_CHAT, {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}),
    ("/v1/completions", {"prompt": "a", "guided_json": _CITY}),
    ("/v1/completions", {"prompt": ["a", "b"], "structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}),
    ("/v1/completions", {"prompt": "a", "guided_choice": ["yes", "no"], "bad_words": ["y"]}),
    (
        "/v1/completions",
        {
            "prompt": "a",
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": _CITY, "end": "</a>"}],
                "triggers": ["<a"],
            },
        },
    ),
    (_RESPONSES, {"input": "hi", "instructions": "be", "store": True, "metadata": {"a": "b"}}),
    (
        _RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "sun"},
            ],
            "tools": [{"type": "function", "name": "weather", "parameters": _CITY, "strict": True}],
            "tool_choice": "required",
            "stream": True,
        },
    ),
    (_RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": _CITY}}}),
    (_RESPONSES, {"input": "hi", "previous_response_id": None, "reasoning": {"effort": "low"}}),
    (_MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "system": [{"type": "text", "text": "be"}]}),
    (
        _MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "sun"}]},
            ],
            "tools": [{"name": "weather", "input_schema": _CITY}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}], "tools": []}),
]
_RIGHT = [str(i).encode() for i in range(len(_BODIES))]
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2.5, 1e308, 2**63, 10**30, "", "a", "auto", "\ud800", "\0", "x" * 5_000, "{"),
    *([], {}, [[]], [None], {"": {}}, {"type": "object"}, {"$ref": "#/a/b"}, "function", "resp_1"),
]


@cache
def _served() -> tuple[asyncio.AbstractEventLoop, ASGIApp]:
    get_logger().setLevel("ERROR")  # else a line a request
    folder = tempfile.TemporaryDirectory(prefix="fuzz-agents")
    model = fakes.write_tiny_model(Path(folder.name), max_position_embeddings=1024)
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": _TEMPLATE}))
    config = EngineConfig(
        model=str(model), load_format="dummy", max_num_seqs=4, kv_cache_memory_bytes=4 << 20, num_threads=1
    )
    engine, loop = EngineClient(config), asyncio.new_event_loop()

    async def start() -> ASGIApp:
        await engine.start()
        await engine.ready()
        return create_app(make_context(engine, served_model_names=("tiny",)))

    app = loop.run_until_complete(start())
    atexit.register(lambda: os.kill(engine.pid, signal.SIGKILL) if engine.pid else None)
    atexit.register(folder.cleanup)
    return loop, app


async def _post(app: ASGIApp, path: str, body: bytes) -> tuple[int, str]:
    """Status and text of the answer, its stream to the end."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"host", b"localhost"),
    ]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("a", 80), "scheme": "http", "root_path": ""}
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    status, pieces = 0, []

    async def receive() -> Any:
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    await app(scope | {"asgi": {"version": "3.0"}, "http_version": "1.1"}, receive, send)
    return status, b"".join(pieces).decode()


def body_of(data: bytes) -> tuple[str, dict[str, Any]]:
    """The path and the body that an input stands for: a number for one that is right."""
    chance = random.Random(data)
    is_right = data in _RIGHT
    path, body = copy.deepcopy(_BODIES[int(data)] if is_right else chance.choice(_BODIES))
    body |= {"model": "tiny", "max_output_tokens" if path == _RESPONSES else "max_tokens": chance.choice((1, 4, 12))}
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    for _ in range(0 if is_right else chance.choice((1, 1, 2, 3))):
        _change(chance, body)
    return path, body


def _change(chance: random.Random, body: dict[str, Any]) -> None:
    """Somewhere in it: another value, one part less, a part of another body, a schema, a part in itself."""
    holder, key = chance.choice(list(_places(body)))
    match chance.randrange(6):
        case 0 | 1:
            holder[key] = copy.deepcopy(chance.choice(_VALUES))
        case 2:
            del holder[key]
        case 3:
            other, name = chance.choice(list(_places(chance.choice(_BODIES)[1])))
            holder[key] = copy.deepcopy(other[name])
        case 4:
            holder[key] = copy.deepcopy(chance.choice(_SCHEMAS))
        case 5:
            for _ in range(chance.choice((1, 5, 70))):
                holder[key] = {"properties": {"a": holder[key]}} if chance.random() < 0.5 else [holder[key]]


def _places(part: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside, as what holds it and where."""
    for key in list(part) if isinstance(part, dict) else range(len(part)):
        yield part, key
        if isinstance(part[key], dict | list):
            yield from _places(part[key])


def parse(data: bytes) -> None:
    path, body = body_of(data)
    loop, app = _served()
    status, text = loop.run_until_complete(asyncio.wait_for(_post(app, path, json.dumps(body).encode()), 60))
    assert status < 500 and "server_error" not in text and "api_error" not in text, (
        f"{path} {json.dumps(body)[:2_000]} -> {status} {text[:500]}"
    )
    assert status == 200 or data not in _RIGHT, text
    if status >= 400:
        assert len(text) < 4_000, "an error that repeats its body"
        raise ValueError(json.loads(text)["error"]["message"])


TARGET = Target(
    name="agent_bodies",
    parse=parse,
    refusals=(ValueError,),
    words=(b"a", b"b"),
    seeds=lambda: list(_RIGHT),
    max_cpu_s=5.0,
)
