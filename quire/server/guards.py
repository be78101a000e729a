"""What stands between a connection and the application, outermost first: the host's name, CORS, keys (`auth.py`), the
gate, the body's limits (`limits.py`).

The host's name: a page of any site can make its own name point at 127.0.0.1 and then read what a server there says, as
if it were its own (DNS rebinding); the Host header still tells the name that the browser used. So on loopback only the
loopback's names are answered, and those of --allowed-hosts. Elsewhere any name may be right, and all are unless
--allowed-hosts says which. A Unix socket is out of a page's reach.

The gate: while the server starts, drains or has lost its engine, requests are turned away with a 503.

    starting, dead   only /health and the page's files are served
    draining         GETs still are, so that metrics and the page show the drain; new work is not taken

Work is whatever is not a GET: those requests are counted, and a drain waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from quire.server.admission import MAX_TOKENS_HEADER
from quire.server.auth import Auth, OnRefused, is_open
from quire.server.errors import ApiError, shown
from quire.server.life import LifeState, ServerLife, UnavailableError
from quire.server.limits import BodyLimits
from quire.server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from quire.server.context import ServerContext

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def middleware(context: ServerContext) -> list[Middleware]:
    settings = context.settings
    guards = [
        Middleware(Auth, keys=settings.api_keys, on_refused=context.refused),
        Middleware(Gate, life=context.life, on_refused=lambda reason: context.first.metrics.on_refused(reason)),
        Middleware(
            BodyLimits,
            max_body_bytes=settings.max_body_bytes,
            timeout_s=settings.body_timeout_s,
            max_file_bytes=settings.batch_dir_bytes if settings.batch_dir else None,
        ),
    ]
    if settings.cors_origins:
        # Outermost: a browser asks beforehand without the key, and must be able to read errors too.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", MAX_TOKENS_HEADER],
        )
        guards.insert(0, cors)
    if (names := allowed_hosts(settings)) is not None:
        guards.insert(0, Middleware(Hosts, names=names, on_refused=context.refused))
    return guards


def allowed_hosts(settings: ServerSettings) -> frozenset[str] | None:
    """The names to answer under, in lower case and without ports; None for any."""
    if "*" in settings.allowed_hosts or settings.uds is not None:
        return None
    names = {name.lower() for name in settings.allowed_hosts}
    if settings.is_local:
        host = settings.host.lower()
        return frozenset({*names, *_LOOPBACK, f"[{host}]" if ":" in host else host})
    return frozenset(names) or None


class Hosts:
    """ASGI middleware. `on_refused` hears what was turned away, and whom."""

    def __init__(
        self,
        app: ASGIApp,
        names: frozenset[str],
        on_refused: OnRefused | None = None,
    ) -> None:
        self._app = app
        self._names = names
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and (host := _name(bytes(value))) not in self._names:
                    error = ApiError(
                        403,
                        f"this server does not answer under the name {shown(host)!r}: use localhost, or start it with "
                        f"--allowed-hosts {shown(host)}",
                        code="host_not_allowed",
                    )
                    if self._on_refused is not None:
                        self._on_refused(error, scope.get("client"))
                    await error.respond(send)
                    return
        await self._app(scope, receive, send)


def _name(host: bytes) -> str:
    """The host's name without its port, and without the dot at the end that makes a name absolute."""
    text = host.decode("latin-1").strip().lower()
    end = text.find("]") + 1 if text.startswith("[") else text.find(":")
    return (text[:end] if end > 0 else text).removesuffix(".")


class Gate:
    """ASGI middleware. `on_refused` hears the state for which a request was turned away."""

    def __init__(self, app: ASGIApp, life: ServerLife, on_refused: Callable[[str], None] | None = None) -> None:
        self._app = app
        self._life = life
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"], scope["method"]):
            await self._app(scope, receive, send)
            return
        state = self._life.state
        is_work = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if state is LifeState.SERVING or (state is LifeState.DRAINING and not is_work):
            if not is_work:
                await self._app(scope, receive, send)
                return
            with self._life.request():
                await self._app(scope, receive, send)
            return
        if self._on_refused is not None:
            self._on_refused(state.value)
        error = UnavailableError(state)
        error.headers["connection"] = "close"  # its next request should reach another server
        await error.respond(send)
