"""Under which names a server answers. A page of any site can make its own name point at 127.0.0.1 and then read what a
server there says, as if it were its own (DNS rebinding); the Host header still tells the name that the browser used.

So on loopback only the loopback's names are answered, and those of --allowed-hosts. Elsewhere any name may be right,
and all are unless --allowed-hosts says which. A Unix socket is out of a page's reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.server.errors import ApiError, shown
from quire.server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class HostError(ApiError):
    def __init__(self, name: str) -> None:
        super().__init__(
            403,
            f"this server does not answer under the name {shown(name)!r}: use localhost, or start it with "
            f"--allowed-hosts {shown(name)}",
            code="host_not_allowed",
        )


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
        on_refused: Callable[[ApiError, tuple[str, int] | None], None] | None = None,
    ) -> None:
        self._app = app
        self._names = names
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and (host := _name(bytes(value))) not in self._names:
                    error = HostError(host)
                    if self._on_refused is not None:
                        self._on_refused(error, scope.get("client"))
                    await error.respond(send)
                    return
        await self._app(scope, receive, send)


def _name(host: bytes) -> str:
    """Without its port, and without the dot at the end that makes a name a whole one."""
    text = host.decode("latin-1").strip().lower()
    end = text.find("]") + 1 if text.startswith("[") else text.find(":")
    return (text[:end] if end > 0 else text).removesuffix(".")
