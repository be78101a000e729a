"""Other wire formats over chat completions: a request is translated, answered by the chat endpoint, and its answer
translated back.

The chat endpoint is called within the process, so that every format has the same checks, admission, deadlines, tools,
grammars, log lines and metrics, and what chat learns the others know. A `Translation` is made for one request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

import msgspec
from starlette.types import Message, Send

from quire.errors import BadRequestError
from quire.server.chat import create_chat
from quire.server.endpoint import Exchange
from quire.server.errors import ApiError, to_api_error
from quire.server.protocol import BodyDecoder, ChatBody
from quire.server.sse import DONE

_decode_chat = BodyDecoder(ChatBody).decode
_EVENT_END = b"\n\n"


class Translation(Protocol):
    """Translates a chat's answer into another format."""

    names: ClassVar[Mapping[str, str]]
    """What the other format calls those of a chat's fields that errors may name; the longer of two comes first."""

    def whole(self, answer: dict[str, Any]) -> Mapping[str, Any]:
        """A whole answer."""

    def chunk(self, chunk: dict[str, Any]) -> list[bytes]:
        """The events that a chunk of a stream makes. The chunk may hold an `error` instead of choices."""

    def ending(self) -> list[bytes]:
        """The events after the last chunk."""


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """A server-sent event with a name, which its data repeat."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **data}))


def parts_of(chunk: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a chat's chunk brings, in the order of the answer: `reasoning` and `content` with their text, `call` with a
    part of a tool call, `end` with the choice that has ended."""
    for choice in chunk["choices"]:
        delta = choice["delta"]
        calls = delta.get("tool_calls") or ()
        # A call that has begun earlier ends before whatever else this chunk brings.
        yield from (("call", call) for call in calls if "id" not in call)
        yield from ((kind, delta[kind]) for kind in ("reasoning", "content") if delta.get(kind))
        yield from (("call", call) for call in calls if "id" in call)
        if choice["finish_reason"] is not None:
            yield "end", choice


def tool_call(call_id: str | None, name: str | None, arguments: str | None) -> dict[str, Any]:
    """A tool call as a chat's message has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def relay(exchange: Exchange, chat: Mapping[str, Any], translation: Translation) -> None:
    """Ask for a chat, and send the client what the translation makes of the answer. Errors before the first byte are
    raised, as the chat endpoint raises them but with the format's own names of the fields."""
    if chat.get("stream"):
        chat = {**chat, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    send, exchange.send = exchange.send, _TranslatedSend(exchange.send, translation)
    try:
        await create_chat(exchange, _decode_chat(msgspec.json.encode(chat)))
    except (ApiError, BadRequestError) as error:
        raise _renamed(to_api_error(error), translation.names) from None
    finally:
        exchange.send = send


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error about a chat's field as one about the client's own."""
    param = error.param or ""
    chat = next((name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))), None)
    if chat is None:
        return error
    own = names[chat] + param.removeprefix(chat)
    # "messages" is a word, too: only what can be nothing but a field's name is replaced.
    message = error.message.replace(param, own, 1) if "_" in param else error.message
    return ApiError(error.status, message, type=error.type, param=own, code=error.code, headers=error.headers)


class _TranslatedSend:
    """ASGI's send. A stream's chunks are translated as they come, another answer when it is whole."""

    def __init__(self, send: Send, translation: Translation) -> None:
        self._send = send
        self._translation = translation
        self._start: Message | None = None  # of an answer that is not whole yet
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            if is_stream:
                await self._send(message)
            else:
                self._start = message
            return
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        if self._start is None:
            body = b"".join(self._translated_events())
            if body or not more:
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        elif not more:
            body = msgspec.json.encode(self._translation.whole(msgspec.json.decode(self._body)))
            headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]
            self._start["headers"] = [*headers, (b"content-length", b"%d" % len(body))]
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": body})

    def _translated_events(self) -> list[bytes]:
        events: list[bytes] = []
        while (at := self._body.find(_EVENT_END)) >= 0:
            one, self._body = self._body[: at + len(_EVENT_END)], self._body[at + len(_EVENT_END) :]
            if one == DONE:
                events += self._translation.ending()
            else:
                events += self._translation.chunk(msgspec.json.decode(one.removeprefix(b"data: ")))
        return events
