"""The messages of a chat request, checked and in one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from quire.errors import BadRequestError

Parts = list[dict[str, Any]]


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies in which every message has a role and a content that is a string or a list of text parts."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _bad("messages", f"must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise _bad("messages", "must not be empty")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def as_string(content: str | Parts) -> str:
    """Text parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_parts(content: str | Parts) -> Parts:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def plain_data(value: Any) -> Any:
    """The same as dicts, lists, strings and numbers of Python's own, which can go to another process."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(one) for one in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Integral):
        return int(value)
    raise _bad("messages", f"and the template's variables must be plain data, and {type(value).__name__} is not")


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(where, f"must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role", f"must be a string such as 'user', got {role!r}")
    checked = dict(message)
    content = message.get("content")
    if content is None and (message.get("tool_calls") or role == "assistant"):
        content = ""  # an assistant that only calls tools says nothing
    checked["content"] = _content(content, f"{where}.content")
    if message.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return checked


def _content(content: Any, where: str) -> str | Parts:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _bad(where, f"must be a string or a list of text parts, got {content!r}")
    parts: Parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            what = f"type {kind!r}" if isinstance(part, Mapping) else type(part).__name__
            raise _bad(f"{where}[{i}]", f'{what} is not supported: send {{"type": "text", "text": ...}}')
        if not isinstance(part.get("text"), str):
            raise _bad(f"{where}[{i}].text", f"must be a string, got {part.get('text')!r}")
        parts.append(dict(part))
    return parts


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """Arguments arrive as JSON text, as they left; templates want the object."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise _bad(where, "must be a list of objects")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise _bad(f"{where}[{i}].function.arguments", f"must be JSON: {error}") from None
            call = {**call, "function": {**function, "arguments": arguments}}
        checked.append(call)
    return checked


def _bad(where: str, what: str) -> BadRequestError:
    return BadRequestError(f"{where} {what}", param="messages")
