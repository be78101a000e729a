"""One HTTP connection: uvicorn's protocol, with limits on what comes before a request's body.

Headers that are too long are a 431, headers that trickle in are a 408, and what is no HTTP is a 400: all in the shape
of every other error. A connection that sends nothing at all is closed.
"""

from __future__ import annotations

import asyncio
import functools
import time
from email.utils import formatdate
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from quire.server.errors import ApiError

_LINGER_S = 0.5


class HeadersTooLargeError(ApiError):
    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(
            431,
            f"the request's headers are longer than {max_header_bytes} bytes, the most that this server takes",
            code="headers_too_large",
        )


class HeadersTimeoutError(ApiError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            408,
            f"the request's headers did not arrive within {timeout_s:g} s",
            type="timeout",
            code="headers_timeout",
        )


class Connection(HttpToolsProtocol):
    """Subclassed with limits by `connection_class`; uvicorn makes one for each connection."""

    max_header_bytes: int
    header_timeout_s: float

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._num_header_bytes = 0
        self._is_in_headers = True  # also before the first byte
        self._header_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # what comes now is thrown away
        was_in_headers = self._is_in_headers
        super().data_received(data)
        if not self._is_in_headers or self._is_refused:
            return
        # They have not ended in this piece. The parser keeps what it has, so their length is bounded here.
        self._num_header_bytes = self._num_header_bytes + len(data) if was_in_headers else 0
        if self._num_header_bytes > self.max_header_bytes:
            self._refuse(HeadersTooLargeError(self.max_header_bytes))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._stop_timer()
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self.max_header_bytes:
            self._refusal = HeadersTooLargeError(self.max_header_bytes)
            raise ValueError("headers too large")  # stops the parser, which calls send_400_response
        self.server_state.default_headers = _date_header(int(time.time()))
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def _start_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._on_header_timeout)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # the start of a next request, while the last one's answer is still under way
        elif self.scope is None:
            self.transport.close()  # not a byte yet: there is nothing to answer
        else:
            self._refuse(HeadersTimeoutError(self.header_timeout_s))

    def _refuse(self, error: ApiError) -> None:
        """Answer and close, without the application."""
        self._stop_timer()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        body = error.encode()
        lines = [STATUS_LINE[error.status]]
        for name, value in self.server_state.default_headers:
            lines += [name, b": ", value, b"\r\n"]
        lines.append(b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        self.transport.write(b"".join([*lines, body]))
        # Closing with bytes unread would reset the connection, and the client might never read the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


@functools.lru_cache(maxsize=1)
def _date_header(now_s: int) -> list[tuple[bytes, bytes]]:
    """Made when a request comes, once a second at most: an idle server has no clock to keep."""
    return [(b"date", formatdate(now_s, usegmt=True).encode())]


def connection_class(*, max_header_bytes: int, header_timeout_s: float) -> type[Connection]:
    """uvicorn takes a class and hands it nothing of ours, so the limits go with the class."""
    limits = {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s}
    return type("LimitedConnection", (Connection,), limits)
