"""Readers of tool calls: each is a generator that is sent a text's characters one by one.

So a reader sees no difference between a text that comes whole and one that comes in pieces. It tells of calls as it
reads them: a call counts from the moment when its name is a tool's and its arguments begin. A reader that finds before
that moment that this is no call raises `NotACall`, and the text is shown as text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator
from typing import Any, Protocol

Reading = Generator[None, str, Any]
_SPACE = " \t\r\n"
_OTHER_KEYS = {"type", "id"}


class NotACall(Exception):
    """The text read so far is no call."""


class Calls(Protocol):
    """Takes the calls that a reader finds."""

    names: frozenset[str]

    def begin(self, name: str) -> None: ...

    def argue(self, text: str) -> None: ...


def skip_space() -> Reading:
    """The first character that is no space."""
    char = yield
    while char in _SPACE:
        char = yield
    return char


def literal(text: str) -> Reading:
    for wanted in text:
        if (yield) != wanted:
            raise NotACall


def until(end: str) -> Reading:
    """The text before `end`, which is read too."""
    read = ""
    while not read.endswith(end):
        read += yield
    return read[: len(read) - len(end)]


def json_string() -> Reading:
    """The text of a string whose opening quote has been read."""
    raw, is_escaped = "", False
    while True:
        char = yield
        if char == '"' and not is_escaped:
            break
        is_escaped = char == "\\" and not is_escaped
        raw += char
    try:
        return json.loads(f'"{raw}"', strict=False)
    except ValueError:
        raise NotACall from None


def json_object(tell: Any) -> Reading:
    """The rest of an object whose brace has been read, told character by character. It ends where its braces do."""
    depth, in_string, is_escaped = 1, False, False
    while depth:
        char = yield
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        tell(char)


def json_call(calls: Calls, name_keys: tuple[str, ...], argument_keys: tuple[str, ...]) -> Reading:
    """An object with a name and arguments, whose brace has been read."""
    name, early, has_begun = None, "", False
    char = yield from skip_space()
    while char == '"':
        key = yield from json_string()
        if (yield from skip_space()) != ":":
            raise NotACall
        char = yield from skip_space()
        if key in name_keys:
            name = (yield from json_string()) if char == '"' else None
            if name not in calls.names:
                raise NotACall
        elif key in argument_keys and char in '{"':
            if char == '"':  # some models write the object as text
                early = yield from json_string()
            elif name is None:
                pieces = ["{"]
                yield from json_object(pieces.append)
                early = "".join(pieces)
            else:
                has_begun = True
                calls.begin(name)
                calls.argue("{")
                yield from json_object(calls.argue)
        elif key in _OTHER_KEYS and char == '"':
            yield from json_string()
        else:
            raise NotACall
        char = yield from skip_space()
        if char == ",":
            char = yield from skip_space()
    if char != "}" or name is None:
        raise NotACall
    if not has_begun:
        calls.begin(name)
        calls.argue(early or "{}")


def json_calls(
    calls: Calls, names: tuple[str, ...], arguments: tuple[str, ...], ends: tuple[str, ...] = (), first: str = ""
) -> Reading:
    """Read one call or a list of them, and one of the markers after it. `first`: what has been read already."""
    char = first or (yield from skip_space())
    is_list = char == "["
    if is_list:
        char = yield from skip_space()
    while True:
        if char != "{":
            raise NotACall
        yield from json_call(calls, names, arguments)
        char = yield from skip_space()  # without a marker, calls go on to the answer's end
        if char == "]" and is_list:
            if not ends:
                return
            char = yield from skip_space()
        if end := next((one for one in ends if one[0] == char), None):
            yield from literal(end[1:])
            return
        if char in ",;":
            char = yield from skip_space()


def named_call(calls: Calls, between: tuple[str, ...], end: str, before: str = "", first: str = "") -> Reading:
    """A name, one of the separators, the arguments as JSON, and the marker after them."""
    name = first or (yield from skip_space())
    while not name.endswith(between):
        if not any(f"{before}{known}{separator}".startswith(name) for known in calls.names for separator in between):
            raise NotACall
        name += yield
    separator = next(one for one in between if name.endswith(one))
    name = name.removesuffix(separator).removeprefix(before).strip()
    char = "{" if separator.endswith("{") else (yield from skip_space())
    if char != "{" or name not in calls.names:
        raise NotACall
    calls.begin(name)
    calls.argue("{")
    yield from json_object(calls.argue)
    if end:
        yield from until(end)


def whole_call(calls: Calls, end: str, parse: Any) -> Reading:
    """Reads a format that is not JSON: text up to the marker, which is made into calls at once."""
    text = yield from until(end)
    tell(calls, parse(text))


def tell(calls: Calls, found: list[tuple[str, dict[str, Any]]] | None) -> None:
    if not found or any(name not in calls.names for name, _ in found):
        raise NotACall
    for name, arguments in found:
        calls.begin(name)
        calls.argue(json.dumps(arguments, ensure_ascii=False))


def python_calls(calls: Calls) -> Reading:
    """A list of calls as Python writes them: [f(a=1), g()]"""
    if (yield from skip_space()) != "[":
        raise NotACall
    name = yield from skip_space()
    while not name.endswith("("):
        if not any(f"{known}(".startswith(name) for known in calls.names):
            raise NotACall
        name += yield
    text, depth, quote, is_escaped = f"[{name}", 2, "", False
    while depth:
        char = yield
        text += char
        if quote:
            quote = "" if char == quote and not is_escaped else quote
            is_escaped = char == "\\" and not is_escaped
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
    tell(calls, _from_python(text))


def _from_python(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    try:
        listed: Any = ast.parse(text, mode="eval").body
        if any(one.args for one in listed.elts):
            return None  # arguments without names
        return [
            (ast.unparse(one.func), {str(given.arg): _constant(given.value) for given in one.keywords})
            for one in listed.elts
        ]
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError):
        return None


_CONSTANTS = {"true": True, "false": False, "null": None}


class _Constants(ast.NodeTransformer):
    """JSON's names of constants, which some models write, as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _constant(value: ast.expr) -> Any:
    return ast.literal_eval(_Constants().visit(value))


def tagged_arguments(pattern: str, head: str) -> Any:
    """A parser of name and arguments in tags: `head` finds the name, `pattern` each (key, value)."""

    def parse(text: str) -> list[tuple[str, dict[str, Any]]] | None:
        found = re.match(head, text, re.S)
        if found is None:
            return None
        arguments = {key.strip(): _loose(value) for key, value in re.findall(pattern, text[found.end() :], re.S)}
        return [(found[1].strip(), arguments)]

    return parse


def _loose(value: str) -> Any:
    """JSON where it is any, else the text."""
    try:
        return json.loads(value)
    except ValueError:
        return value.removeprefix("\n").removesuffix("\n")


def parse_gemma(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """call:NAME{key:<escape>text<escape>,other:3}"""
    found = re.fullmatch(r"\s*call:([\w.-]+)\{(.*)\}\s*", text, re.S)
    if found is None:
        return None
    texts: list[str] = []

    def keep(match: re.Match[str]) -> str:
        texts.append(match[1])
        return f'"\ue000{len(texts) - 1}"'

    body = re.sub(r"<escape>(.*?)<escape>", keep, found[2], flags=re.S)
    body = re.sub(r"([{,]|^)\s*([\w-]+)\s*:", r'\1"\2":', body)
    try:
        arguments = json.loads("{" + body + "}")
    except ValueError:
        return None
    return [(found[1], _restored(arguments, texts))]


def _restored(value: Any, texts: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _restored(one, texts) for key, one in value.items()}
    if isinstance(value, list):
        return [_restored(one, texts) for one in value]
    if isinstance(value, str) and value.startswith("\ue000"):
        return texts[int(value[1:])]
    return value
