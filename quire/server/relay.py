"""Other wire formats over chat completions: a request is translated, answered by the chat endpoint, and its answer
translated back.

The chat endpoint is called within the process, so that every format has the same checks, admission, deadlines, tools,
grammars, log lines and metrics, and what chat learns the others know. A `Translation` is made for one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Send

from quire.server.chat import create_chat
from quire.server.endpoint import Exchange
from quire.server.protocol import BodyDecoder, ChatBody
from quire.server.sse import DONE

_decode_chat = BodyDecoder(ChatBody).decode
_EVENT_END = b"\n\n"


class Translation(Protocol):
    """Translates a chat's answer into another format."""

    def whole(self, answer: dict[str, Any]) -> Mapping[str, Any]:
        """A whole answer."""

    def chunk(self, chunk: dict[str, Any]) -> list[bytes]:
        """The events that a chunk of a stream makes. The chunk may hold an `error` instead of choices."""

    def ending(self) -> list[bytes]:
        """The events after the last chunk."""


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """A server-sent event with a name, which its data repeat."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **data}))


async def relay(exchange: Exchange, chat: Mapping[str, Any], translation: Translation) -> None:
    """Ask for a chat, and send the client what the translation makes of the answer. Errors before the first byte are
    raised, as the chat endpoint raises them."""
    send, exchange.send = exchange.send, _TranslatedSend(exchange.send, translation)
    try:
        await create_chat(exchange, _decode_chat(msgspec.json.encode(chat)))
    finally:
        exchange.send = send


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
