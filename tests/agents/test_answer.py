"""However an answer's text is cut, the same calls, thoughts and content come out."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.agents import THINKING_FORMATS, AnswerParser
from quire.agents.formats import FORMATS, LISTED, find_format

NAMES = frozenset({"get_weather", "add", "get"})
CITY = {"city": 'São "P" </tool_call> {x}', "days": 3}
CALL = json.dumps(CITY, ensure_ascii=False)
ADD = json.dumps({"a": 1, "b": [2, {"c": None}]})

# Format -> a text with two calls in it, what is content, and the calls.
TEXTS: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "hermes": (
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {CALL}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call>',
        "I look.",
        [("get_weather", CITY), ("add", json.loads(ADD))],
    ),
    "llama3_json": (
        f'{{"name": "get_weather", "parameters": {CALL}}}; {{"name": "add", "parameters": {ADD}}}',
        "",
        [("get_weather", CITY), ("add", json.loads(ADD))],
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {CALL}}}, {{"name": "add", "arguments": {ADD}}}]',
        "",
        [("get_weather", CITY), ("add", json.loads(ADD))],
    ),
    "granite": (
        f'Now <|tool_call|>[{{"name": "get_weather", "arguments": {CALL}}}]',
        "Now",
        [("get_weather", CITY)],
    ),
    "deepseek_v3": (
        "Well<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        + CALL
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        + ADD
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well",
        [("get_weather", CITY), ("add", json.loads(ADD))],
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CALL}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("get_weather", CITY)],
    ),
    "glm45": (
        "Ok <tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "Ok",
        [("get_weather", {"city": "Rome", "days": 3})],
    ),
    "qwen3_xml": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "Rome", "days": 3})],
    ),
    "functiongemma": (
        "<start_function_call>call:get_weather{city:<escape>Rome, {it}<escape>,days:3}<end_function_call>",
        "",
        [("get_weather", {"city": "Rome, {it}", "days": 3})],
    ),
    "pythonic": (
        "[get_weather(city='Ro]m\"e', days=3), add(a=-1, b=[2, {'c': null}])]",
        "",
        [("get_weather", {"city": 'Ro]m"e', "days": 3}), ("add", {"a": -1, "b": [2, {"c": None}]})],
    ),
    "json": (
        f'[{{"name": "get_weather", "parameters": {CALL}}}, {{"name": "add", "parameters": {ADD}}}]',
        "",
        [("get_weather", CITY), ("add", json.loads(ADD))],
    ),
}
TEXTS["minimax"] = (
    f'Ok\n<tool_calls>\n{{"name": "get_weather", "arguments": {CALL}}}\n{{"name": "add", "arguments": {ADD}}}\n'
    "</tool_calls>",
    "Ok",
    [("get_weather", CITY), ("add", json.loads(ADD))],
)
MISTRAL_NEW = (f"Hm [TOOL_CALLS]get_weather[ARGS]{CALL}[TOOL_CALLS]add{ADD}", "Hm")


def form(name: str) -> Any:
    return LISTED if name == "json" else FORMATS[name]


def parse(pieces: list[str], **how: Any) -> tuple[str, str, list[tuple[str, str]]]:
    parser = AnswerParser(names=NAMES, **how)
    reasoning = content = ""
    calls: list[list[str]] = []
    for delta in [*map(parser.push, pieces), parser.finish()]:
        reasoning += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return reasoning, content, [(name, arguments) for name, arguments in calls]


def cut(text: str, rng: random.Random) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 3, 7, 30))
        pieces.append(text[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_read_and_cuts_change_nothing(name: str) -> None:
    text, content, calls = TEXTS[name]
    whole = parse([text], tools=form(name))
    assert whole[1] == content
    assert [(n, json.loads(arguments)) for n, arguments in whole[2]] == calls
    for seed in range(60):
        assert parse(cut(text, random.Random(seed)), tools=form(name)) == whole
    assert parse(list(text), tools=form(name)) == whole


@pytest.mark.parametrize("name", TEXTS)
def test_half_a_call_is_never_content(name: str) -> None:
    text, content, calls = TEXTS[name]
    for end in range(len(text)):
        _, shown, found = parse([text[:end]], tools=form(name))
        rest = shown[len(content) :] if shown.startswith(content) else ""
        # Of a call no more is shown than a marker that has only begun.
        assert content.startswith(shown) or any(
            marker.startswith(rest.strip()) for marker in (*form(name).begins, *form(name).dropped)
        ), (text[:end], shown)
        assert [n for n, _ in found] == [n for n, _ in calls][: len(found)]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    "text",
    [
        "Just words, with spaces  \n and lines.\n",
        '{"name": "unknown", "arguments": {}}',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> after',
        "Write <tool_call> around it, or [TOOL_CALLS] or <|tool_call|>, as in <tool_call>this</tool_call>.",
        '{"a": 1}',
        "[1, 2, 3]",
        "[get_pear(x=1)]",
        " \n[",
        "a < b and <|python_tag|> too",
        'So: ```json\n{"name": "unknown", "arguments": {}}\n``` and ```json\n[1]\n```.',
    ],
)
def test_what_only_looks_like_a_call_stays_text(name: str, text: str) -> None:
    if name in ("glm45", "qwen3_xml", "functiongemma", "deepseek_v3", "deepseek_v31"):
        text = text.replace("<tool_call>", "<tool_cal>")
    whole = parse([text], tools=form(name))
    assert not whole[2]
    if not text.startswith(("{", "[", " ")) or form(name).bare:
        assert whole[1].strip() in (text.strip(), "") or whole[1] == text
    assert parse(list(text), tools=form(name)) == whole


def test_a_call_in_a_fence_is_one_too() -> None:
    text = f'So:\n```json\n{{\n  "name": "get_weather",\n  "arguments": {CALL}\n}}\n```'
    whole = parse([text], tools=FORMATS["hermes"])
    assert whole == ("", "So:", [("get_weather", CALL)])
    assert parse(list(text), tools=FORMATS["hermes"]) == whole


def test_new_calls_of_mistral() -> None:
    text, content = MISTRAL_NEW
    whole = parse([text], tools=FORMATS["mistral"])
    assert whole == ("", content, [("get_weather", CALL), ("add", ADD)])
    assert parse(list(text), tools=FORMATS["mistral"]) == whole


@given(st.text(alphabet='<tool_call>/{}"name:,[]()= \nadarguments1', max_size=80), st.integers(0, 1000))
def test_any_text_in_any_cut(text: str, seed: int) -> None:
    for name in ("hermes", "llama3_json", "pythonic", "mistral", "glm45"):
        assert parse(cut(text, random.Random(seed)), tools=form(name)) == parse([text], tools=form(name))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", ["think", "mistral"])
def test_thinking(kind: str, is_open: bool) -> None:
    thinking = THINKING_FORMATS[kind]
    thought = "Let me <b>think</b>.\nTwice."
    head = "" if is_open else f"\n{thinking.begin}"
    for answer, calls in (("The answer < 5.", []), (TEXTS["hermes"][0], ["get_weather", "add"])):
        text = f"{head}{thought}{thinking.end}\n\n{answer}"
        for pieces in ([text], list(text), cut(text, random.Random(3))):
            found = parse(pieces, thinking=thinking, is_open=is_open, tools=FORMATS["hermes"])
            assert found[0] == thought
            assert found[1] == ("I look." if calls else answer)
            assert [name for name, _ in found[2]] == calls
    unfinished = parse([head + thought], thinking=thinking, is_open=is_open)
    assert unfinished == (thought, "", [])
    if not is_open:
        plain = f"No thought {thinking.begin} here"
        assert parse(list(plain), thinking=thinking) == ("", plain, [])


def test_formats_are_found_in_templates() -> None:
    for name, one in FORMATS.items():
        found = find_format("{% if tools %}" + " ".join(one.marks))
        assert found is one, name
    assert find_format("{% for tool in tools %}") is None
