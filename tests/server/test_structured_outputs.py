"""Structured output over HTTP, from an engine in a process of its own, as the unmodified OpenAI client asks for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from server_harness import Server, real_engine, running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["sun", "rain"]}},
    "required": ["ok", "word"],
    "additionalProperties": False,
}
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def real(tiny_model: Path) -> Iterator[Server]:
    with running(real_engine(tiny_model, max_model_len=256), served_model_names=("tiny",)) as server:
        yield server


@pytest.fixture
def client(real: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)


def test_json_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 150, "seed": 3, "response_format": wanted}
    whole = client.chat.completions.create(**asked, n=2, temperature=1.0)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    parts = list(client.chat.completions.create(**asked, temperature=1.0, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_regex": "a{2,4}b"}, "a{2,4}b"),
        ({"guided_grammar": 'root ::= "x" | "yy"'}, "x|yy"),
        ({"guided_json": {"const": 5}}, "5"),
        ({"guided_json": json.dumps({"type": "array", "maxItems": 0}), "guided_whitespace_pattern": " ?"}, r"\[ ?\]"),
        ({"structured_outputs": {"regex": "no+"}, "max_tokens": 4}, "no*"),
        ({"structured_outputs": {"json": {"enum": ["é"]}, "disable_any_whitespace": True}}, '"é"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": None}}}}, "null"),
        ({"response_format": {"type": "text"}, "max_tokens": 1, "allowed_token_ids": [65]}, "."),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 1}, r"\{"),
    ],
)
def test_every_field(real: Server, fields: dict[str, Any], pattern: str) -> None:
    for path, prompt in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": USER})):
        body = {"max_tokens": 60, "temperature": 1.0, **prompt, **fields}
        reply = real.post(path, body)
        assert reply.status == 200, reply.text
        (choice,) = reply.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"items": {"not": {}}}}, "guided_json.items.not"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json.uniqueItems"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"if": {}}}}},
            "response_format.json_schema.schema.if",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {"type": "integer", "multipleOf": 1_000_003}}, "guided_json.multipleOf"),
        ({"guided_json": {"const": "x"}, "prompt": ["a"] * 2000, "guided_grammar": None, "n": 2}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(real: Server, fields: dict[str, Any], param: str) -> None:
    reply = real.post("/v1/completions", {"prompt": "hi", **fields})
    assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_grammar_that_runs_dry_is_the_senders_mistake(real: Server) -> None:
    reply = real.post("/v1/completions", {"prompt": "hi", "guided_regex": "a", "min_tokens": 2, "stream": False})
    assert reply.status == 400, reply.text
    assert "structured_outputs" in reply.json()["error"]["message"]


def test_messages_have_the_requests_own_name_of_the_field(real: Server) -> None:
    for schema, message in (
        ({"type": "strin"}, "response_format cannot be compiled: Invalid type: strin"),
        ({"not": {}}, "response_format.json_schema.schema.not: the keyword not is not supported: leave it out"),
    ):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        reply = real.post("/v1/chat/completions", {"messages": USER, "response_format": wanted})
        assert reply.json()["error"]["message"] == message
    reply = real.post("/v1/completions", {"prompt": "hi", "guided_regex": "("})
    assert reply.json()["error"]["message"].startswith("guided_regex cannot be compiled: ")
