from __future__ import annotations

from typing import Any

import pytest

from quire.errors import BadRequestError
from quire.text.messages import as_parts, as_string, normalized


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of messages, got str"),
        ({"role": "user"}, "messages must be a list"),
        ([], "messages must not be empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be a string such as 'user', got None"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string or a list of text parts, got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content .* got 3"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[0\] type 'image_url' is not supported",
        ),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] str is not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a string, got None"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments must be JSON",
        ),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"messages\[0\]\.tool_calls must be a list of objects"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        normalized(messages)
    assert caught.value.param == "messages"


def test_tool_calls_get_their_arguments_as_objects_and_the_callers_stay_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    original = {"role": "assistant", "content": None, "tool_calls": [call]}
    (message,) = normalized([original])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert call["function"]["arguments"] == '{"x": 1}' and original["content"] is None


def test_parts_and_strings() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_string(parts) == "a\nb"
    assert as_parts("a") == parts[:1]
    assert as_string("a") == "a" and as_parts(parts) == parts
