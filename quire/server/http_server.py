"""uvicorn, run by us: its own signals, its ten wake-ups a second and its access log are off."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import sys
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.server.auth import OnRefused
from quire.server.connection import connection_class
from quire.server.settings import ServerSettings

_OTHER_FILES = 48  # about thirty are open before the first connection
_CLOSE_S = 1  # for connections that are still open when everything that counts has ended


def max_connections() -> int:
    """As many as there may be open files, less some for everything else: over it a client is told, where the system
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
        on_refused: OnRefused | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=connection_class(
                max_header_bytes=settings.max_header_bytes,
                header_timeout_s=settings.header_timeout_s,
                max_connections=max_connections(),
                on_refused=on_refused,
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
        self._header_timeout_s = settings.header_timeout_s
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own, but a TLS handshake has the headers' time instead of a minute."""
        await self.lifespan.startup()
        timeout_s = self._header_timeout_s if self.config.ssl is not None else None
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

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[no-any-return]

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
