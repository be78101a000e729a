"""uvicorn, run by us: its own signals, its ten wake-ups a second and its access log are off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from quire.server.connection import connection_class
from quire.server.settings import ServerSettings

_CLOSE_S = 1  # for connections that are still open when everything that counts has ended


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket until `stop`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, ssl_context: ssl.SSLContext | None) -> None:
        config = uvicorn.Config(
            app,
            http=connection_class(
                max_header_bytes=settings.max_header_bytes, header_timeout_s=settings.header_timeout_s
            ),
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
        self._stopping = asyncio.Event()

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
