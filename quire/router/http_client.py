"""A router's HTTP/1.1 client: connections to a few servers that are kept, and answers handed on in the pieces in which
they come.

A router shares its machine's cores with what it routes to, and passes on a piece for every token. So answers are parsed
by httptools, as requests are, and between a socket and its reader there is one list of bytes.

Whatever goes wrong is an OSError: nobody answers, the connection breaks, what comes is no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Iterable
from urllib.parse import urlsplit

import httptools

Headers = list[tuple[bytes, bytes]]  # with names in lower case

_KEPT_S = 15.0  # an idle connection; after that its server may be about to close it
_MAX_UNREAD_BYTES = 64 << 10  # then the server is left waiting until its client has taken some
_CONNECT_S = 5.0


class Reply:
    """An answer that has begun. Whoever has one closes it."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers
        self._is_closed = False

    @property
    def is_complete(self) -> bool:
        """Nothing is left to read."""
        return self._connection.is_complete and not self._connection.pieces

    def header(self, name: bytes) -> bytes | None:
        return next((value for one, value in self.headers if one == name), None)

    @property
    def content_type(self) -> bytes:
        return (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()

    async def read_some(self) -> bytes:
        """What has come since; at least something, unless the answer is complete."""
        return await self._connection.read_some()

    async def read(self, max_bytes: int | None = None) -> bytes:
        """The rest. Raises an OSError where it is longer than that."""
        found, num_bytes = [], 0
        while piece := await self.read_some():
            found.append(piece)
            num_bytes += len(piece)
            if max_bytes is not None and num_bytes > max_bytes:
                raise ConnectionError(f"the answer is longer than {max_bytes} bytes")
        return b"".join(found)

    def close(self) -> None:
        """Its connection is kept where all of the answer was read, and cut where not: the server notices, and stops."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.let_go()


class HttpClient:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._tls: ssl.SSLContext | None = None

    async def ask(self, method: str, url: str, path: bytes, headers: Iterable[tuple[bytes, bytes]] = (),
                  body: bytes = b"") -> Reply:  # fmt: skip
        """Returns when the answer begins. `url`: of the server. There is no limit on the time but for connecting."""
        lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), path, _host(url))]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if body or method == "POST":
            lines.append(b"content-length: %d\r\n" % len(body))
        data = b"".join([*lines, b"\r\n", body])
        idle = self._idle.setdefault(url, [])
        now_s = asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()  # the newest: the others grow old and are closed
            if now_s - connection.idle_since_s > _KEPT_S:
                connection.cut()
                continue
            try:
                return await connection.ask(data)
            except OSError:
                if connection.has_heard:
                    raise
                # Its server closed it just now, as servers do with idle ones: the request was not taken.
        return await (await self._connect(url, idle)).ask(data)

    async def close(self) -> None:
        for connection in list(self._open):
            connection.cut()
        self._idle.clear()
        await asyncio.sleep(0)  # for the transports to close

    async def _connect(self, url: str, idle: list[_Connection]) -> _Connection:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        if is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_S):
            _, connection = await loop.create_connection(
                lambda: _Connection(idle, self._open),
                parts.hostname or "",
                parts.port or (443 if is_tls else 80),
                ssl=self._tls if is_tls else None,
            )
        return connection


@functools.lru_cache
def _host(url: str) -> bytes:
    return urlsplit(url).netloc.encode("idna")


class _Connection(asyncio.Protocol):
    """One request at a time."""

    transport: asyncio.Transport

    def __init__(self, idle: list[_Connection], among: set[_Connection]) -> None:
        self._idle, self._among = idle, among
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._error: OSError | None = None
        self._num_unread = 0
        self._is_paused = False
        self._is_asked = False  # an answer is due, or is being read
        self._has_head = False
        self._is_kept = False  # the server leaves it open after this answer
        self.idle_since_s = 0.0
        self.is_complete = True
        self.has_heard = False  # something, since it was asked
        self.status = 0
        self.headers: Headers = []
        self.pieces: list[bytes] = []

    async def ask(self, data: bytes) -> Reply:
        self._is_asked, self.is_complete, self._has_head, self.has_heard = True, False, False, False
        self.headers, self.pieces, self._num_unread = [], [], 0
        try:
            if self._error is None:
                self.transport.write(data)
            while not self._has_head:
                await self._change()
        except BaseException:
            self.cut()
            raise
        return Reply(self)

    async def read_some(self) -> bytes:
        while not self.pieces:
            if self.is_complete:
                return b""
            await self._change()
        found = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces, self._num_unread = [], 0
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        return found

    def let_go(self) -> None:
        self._is_asked = False
        if not self.is_complete or self.pieces or self._error is not None or not self._is_kept:
            self.cut()
        else:
            self.idle_since_s = self._loop.time()
            self._idle.append(self)

    def cut(self) -> None:
        self._error = self._error or ConnectionAbortedError("the connection was closed here")
        self.transport.abort()

    async def _change(self) -> None:
        """Wait until something comes."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]
        self._among.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._is_asked or self.is_complete:
            self.cut()  # nobody asked for it
            return
        self.has_heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._error = ConnectionError(f"its answer is no HTTP: {error}")
            self.transport.abort()
        if self._num_unread > _MAX_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._among.discard(self)
        with contextlib.suppress(ValueError):
            self._idle.remove(self)
        if self._has_head and exc is None and self._error is None and not self._has_length():
            self.is_complete = True  # that was its end
        reason = f"the connection broke: {exc}" if exc is not None else "the connection was closed"
        self._error = self._error or ConnectionResetError(reason)
        self._wake()

    def _has_length(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # -- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []  # the answer itself follows
        else:
            self._has_head, self._is_kept = True, self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self._num_unread += len(body)

    def on_message_complete(self) -> None:
        self.is_complete = self._has_head
