"""The gate: while the server starts, drains or has lost its engine, requests are turned away with a 503.

    starting, dead   only /health and the page's files are served
    draining         GETs still are, so that metrics and the page show the drain; new work is not taken

Work is whatever is not a GET: those requests are counted, and a drain waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.server.auth import is_open
from quire.server.life import LifeState, ServerLife, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send


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
