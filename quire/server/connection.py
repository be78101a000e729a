"""One HTTP connection: uvicorn's protocol, with limits on what comes before a request's body.

Headers that are too long are a 431, headers that trickle in are a 408, and what is no HTTP is a 400: all in the shape
of every other error. A connection that sends nothing at all is closed, and so is one whose client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import sys
import time
from email.utils import formatdate
from typing import Any

from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.server.errors import ApiError

_LINGER_S = 0.5
_UNREAD_S = 60.0  # for which an answer may lie unread, when no more of it can be sent
_MAX_PIPELINED = 8
# An offer to speak another protocol, which Java's client makes for HTTP/2. The parser would take it as accepted, and
# what follows for that protocol; under another name of the same length it is a header like any.
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_NO_UPGRADE = b"\r\nx-offer:"


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
        self._is_between_requests = False  # one has been read whole, and no byte of the next
        self._header_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._is_refused = False
        self._unread_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # whose answer is under way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        self.pipeline.clear()
        if self._running is not None and self._running is not self.cycle:
            # uvicorn tells the request that was read last, and this one was sent before it.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again(self._num_unsent())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _look_again(self, num_unsent: int) -> None:
        self._unread_timer = self.loop.call_later(_UNREAD_S, self._on_unread, num_unsent)

    def _on_unread(self, num_before: int) -> None:
        """Nothing is added while writing is paused, so a client that reads at all makes it less."""
        num_unsent = self._num_unsent()
        if num_unsent < num_before:
            self._look_again(num_unsent)
        else:
            self.transport.abort()

    def _num_unsent(self) -> int:
        """Bytes that the client has not taken: here, and in the system's buffer, where the system tells."""
        num_bytes = self.transport.get_write_buffer_size()
        connection = self.transport.get_extra_info("socket")
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import fcntl
            import termios

            found = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += int.from_bytes(found, sys.byteorder)
        return num_bytes

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            _end_by_closing(cycle)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # what comes now is thrown away
        was_in_headers = self._is_in_headers
        if was_in_headers or self._is_between_requests:
            head, end, rest = data.partition(b"\r\n\r\n")
            if _UPGRADE.search(head):
                data = _UPGRADE.sub(_NO_UPGRADE, head) + end + rest
        super().data_received(data)
        if not self._is_in_headers or self._is_refused:
            return
        # They have not ended in this piece. The parser keeps what it has, so their length is bounded here.
        self._num_header_bytes = self._num_header_bytes + len(data) if was_in_headers else 0
        if self._num_header_bytes > self.max_header_bytes:
            self._refuse(HeadersTooLargeError(self.max_header_bytes))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_between_requests = True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._is_between_requests = False
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
        if 0 < len(self.pipeline) <= _MAX_PIPELINED:
            self.flow.resume_reading()  # or nobody would see that the client hangs up

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


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: an answer whose length nobody knows before ends with its connection."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # each piece is as long as it is
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


@functools.lru_cache(maxsize=1)
def _date_header(now_s: int) -> list[tuple[bytes, bytes]]:
    """Made when a request comes, once a second at most: an idle server has no clock to keep."""
    return [(b"date", formatdate(now_s, usegmt=True).encode())]


def connection_class(*, max_header_bytes: int, header_timeout_s: float) -> type[Connection]:
    """uvicorn takes a class and hands it nothing of ours, so the limits go with the class."""
    limits = {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s}
    return type("LimitedConnection", (Connection,), limits)
