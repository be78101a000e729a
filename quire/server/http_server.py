"""uvicorn, run by us: its own signals, its ten wake-ups a second and its access log are off.

Its connections have limits on what comes before a request's body. Headers that are too long are a 431, headers that
trickle in are a 408, and what is no HTTP is a 400: all in the shape of every other error. A connection that sends
nothing at all is closed, and so is one whose client does not read. One that is over the limit of open files is a 503. A
client that has sent all it will may still read its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import select
import socket
import ssl
import sys
import time
from collections.abc import Generator
from email.utils import formatdate
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.server.errors import ApiError, OnRefused, unheard
from quire.server.hang_up import HANG_UP, HangUp
from quire.server.settings import ServerSettings

_OTHER_FILES = 48  # about thirty are open before the first connection
_CLOSE_S = 1  # for connections that are still open when everything that counts has ended


def max_connections() -> int:
    """The limit of open files, less some for everything else. A client over it is told so, where the system
    would only drop it."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if allowed == resource.RLIM_INFINITY else max(1, allowed - _OTHER_FILES)


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket until `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        ssl_context: ssl.SSLContext | None,
        on_refused: OnRefused = unheard,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,  # its loggers are given our handler
            access_log=False,
            proxy_headers=False,  # nothing here trusts where a request says it comes from
            server_header=False,
            date_header=False,  # `connection` has a cheaper one
            timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]  # a timer takes parts of seconds too
            timeout_graceful_shutdown=_CLOSE_S,
        )
        config.load()
        config.ssl = ssl_context
        super().__init__(config)
        self._settings = settings
        self._max_connections = max_connections()
        self._on_refused = on_refused
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own, but a TLS handshake has the headers' time instead of a minute."""
        await self.lifespan.startup()
        timeout_s = self._settings.header_timeout_s if self.config.ssl is not None else None
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._connection,
                sock=listener,
                ssl=self.config.ssl,
                ssl_handshake_timeout=timeout_s,
                backlog=self.config.backlog,
            )
            for listener in sockets or ()
        ]
        self.started = True

    def _connection(self) -> Connection:
        connection = Connection(self.config, self.server_state, self.lifespan.state)
        connection.settings, connection.max_connections = self._settings, self._max_connections
        connection.on_refused = self._on_refused
        return connection

    async def run_on(self, listener: socket.socket) -> None:
        """Returns after `stop`, when connections are closed. uvicorn closes the socket."""
        await self.serve(sockets=[listener])

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # `run.py` has its own


_LINGER_S = 0.5
_UNREAD_S = 60.0  # for which an answer may lie unread, when no more of it can be sent
_MAX_PIPELINED = 8
_LOOK_S = 0.2  # until a client that is gone has refused what was sent to it
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(HttpToolsProtocol):
    """One HTTP connection."""

    settings: ServerSettings
    max_connections: int
    on_refused: OnRefused

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self._num_header_bytes = 0
        self._is_in_headers = True  # also before the first byte
        self._is_declining = False  # the request that is being read offers to speak another protocol
        self._header_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._is_refused = False
        self._unread_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # whose answer is under way
        self._hang_up = HangUp()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            message = "the server has as many connections as it may open: try again, or raise its limit of open files"
            self._refuse(ApiError(503, message, code="too_many_connections"))
            transport.close()  # at once: this one must be closed before the next one comes
        else:
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
        self._hang_up.happened()

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
        """Close a connection whose client has read nothing. Nothing is added while writing is paused, so a client that
        reads at all makes it less."""
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
        cycle.scope["state"][HANG_UP] = self._hang_up
        if cycle.scope["http_version"] == "1.0":
            _end_by_closing(cycle)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # what comes now is thrown away
        was_in_headers = self._is_in_headers
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("")
        if not self._is_in_headers or self._is_refused:
            return
        # They have not ended in this piece. The parser keeps what it has, so their length is bounded here.
        self._start_timer()
        self._unset_keepalive_if_required()
        self._num_header_bytes = self._num_header_bytes + len(data) if was_in_headers else 0
        if self._num_header_bytes > self.settings.max_header_bytes:
            self._refuse(self._headers_too_large())

    def _decline(self, rest: bytes) -> None:
        """Read a request again without its offer of another protocol, which Java's client makes for HTTP/2 with every
        request. The parser takes an offer as accepted, and what follows for that protocol."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._is_declining = False
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It may have closed the connection, or wait for its answer; which, only sending
        tells: one that is gone refuses what it gets. So it gets a line that means nothing, if no answer is under way.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._is_refused or self.scheme == "https":
            return False  # closes it: nothing is left to answer, or TLS, which knows no half
        cycle.keep_alive = False
        if self._running is not None and not self._running.response_started:
            if self._running.scope["http_version"] == "1.0":
                return False
            self.transport.write(_CONTINUE)
        self._look()  # one on this machine has refused it by now
        return True

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # an error or a hang-up: those are told whatever was asked for
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_S, self._look)

    def on_message_complete(self) -> None:
        if not self._is_declining:
            super().on_message_complete()
            if not self.pipeline:
                self.flow.resume_reading()  # after a long last piece, or a client that hangs up would not be seen

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._stop_timer()
        self._unset_keepalive_if_required()  # not before: line ends between requests are no request
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self.settings.max_header_bytes:
            self._refusal = self._headers_too_large()
            raise ValueError("headers too large")  # stops the parser, and send_400_response is called
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._refusal = ApiError(405, "this server is no proxy: it does not take CONNECT")
                raise ValueError("no proxy")
            self._is_declining = True
            return
        self.server_state.default_headers = _date_header(int(time.time()))
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _MAX_PIPELINED:
            self.flow.resume_reading()  # or a client that hangs up would not be seen

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def _start_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.settings.header_timeout_s, self._on_header_timeout)

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
            message = f"the request's headers did not arrive within {self.settings.header_timeout_s:g} s"
            self._refuse(ApiError(408, message, type="timeout", code="headers_timeout"))

    def _headers_too_large(self) -> ApiError:
        most = f"{self.settings.max_header_bytes} bytes, the most that this server takes"
        return ApiError(431, f"the request's headers are longer than {most}", code="headers_too_large")

    def _refuse(self, error: ApiError) -> None:
        """Answer and close, without the application."""
        self._stop_timer()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self.on_refused(error, self.client)
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
    """HTTP/1.0 has no chunks: an answer without a known length ends with its connection."""
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
