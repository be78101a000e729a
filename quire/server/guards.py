"""What stands between a connection and the application, outermost first: the host's name, CORS, keys, the gate, the
body's limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from quire.server.admission import MAX_TOKENS_HEADER
from quire.server.auth import Auth
from quire.server.gate import Gate
from quire.server.hosts import Hosts, allowed_hosts
from quire.server.limits import BodyLimits

if TYPE_CHECKING:
    from quire.server.context import ServerContext


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
