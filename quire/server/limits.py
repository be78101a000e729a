"""Limits on what a client sends: a body too large is a 413, one that trickles in is a 408.

Both are enforced while the body arrives, so a chunked one without a length is no way around them. Headers are the
business of `connection.py`, below ASGI.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.server.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# After a 413 the rest is read and thrown away for a moment: closing at once would reset the connection, and most
# clients would then report a broken pipe instead of our answer.
_LINGER_S = 1.0
_LINGER_BYTES = 64 << 20
_CLOSE = {"connection": "close"}


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes, the most that this server takes (--max-body-bytes)"
    return ApiError(413, message, code="body_too_large", headers=_CLOSE)


class BodyLimits:
    """ASGI middleware: counts and times the body as the application reads it.

    A file that is uploaded may be larger (`max_file_bytes`), and then each piece of it has the time of a body.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, timeout_s: float, max_file_bytes: int | None = None
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = _HeldSend(send)
        length = content_length(scope)
        is_file = scope["path"] == "/v1/files" and self._max_file_bytes is not None
        max_bytes = self._max_file_bytes if is_file and self._max_file_bytes is not None else self._max_body_bytes
        if length is not None and length > max_bytes:
            await _too_large(max_bytes).respond(held.hold())
            await held.let_go(receive)
            return
        ends_s: float | None = None
        num_bytes = 0
        is_complete = False
        refusal: ApiError | None = None

        async def limited_receive() -> Message:
            nonlocal ends_s, num_bytes, is_complete, refusal
            if is_complete:
                return await receive()  # only a hang-up can follow
            if ends_s is None or is_file:
                ends_s = asyncio.get_running_loop().time() + self._timeout_s
            try:
                async with asyncio.timeout_at(ends_s):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self._timeout_s:g} s"
                refusal = ApiError(408, late, type="timeout", code="body_timeout", headers=_CLOSE)
                raise refusal from None
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if num_bytes > max_bytes:
                    refusal = _too_large(max_bytes)
                    held.hold()
                    raise refusal
            return message

        try:
            await self._app(scope, limited_receive, held)
        except ApiError as error:
            if error is not refusal or held.has_begun:
                raise
            await error.respond(held)
        if refusal is not None and refusal.status == 413 and not is_complete:
            await held.let_go(receive)
        else:
            await held.let_go()


def content_length(scope: Scope) -> int | None:
    """The length that the client announced; what is no number is the HTTP parser's to refuse."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return None


class _HeldSend:
    """ASGI's send, which can hold back the end of a response: the server closes the connection with it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._holds = False
        self._is_ended = False
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        if self._holds and message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_ended = True
            message = {**message, "more_body": True}
        await self._send(message)

    def hold(self) -> _HeldSend:
        self._holds = True
        return self

    async def let_go(self, receive: Receive | None = None) -> None:
        """End the response; with `receive`, after throwing away what the client still sends, for a moment."""
        if receive is not None:
            await _throw_away(receive)
        if self._is_ended:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _throw_away(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while num_bytes < _LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        pass
