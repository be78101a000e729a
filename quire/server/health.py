"""/health, also as /ping: 200 only while the engine is idle or its steps make progress; else 503 and why.

Anyone may read it, so it tells fixed sentences: details are in the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.api import EngineState
from quire.server.life import REASONS, RETRY_AFTER_S, LifeState, ServerLife

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.routing import Route

    from quire.engine.api import ServingEngine
    from quire.server.context import ServerContext

_STUCK = "a step of the engine takes longer than the watchdog allows"


def status_of(life: ServerLife, *engines: ServingEngine) -> tuple[str, str]:
    """A word and a sentence: ok, starting, draining, dead or stuck."""
    if life.state is not LifeState.SERVING:
        return life.state.value, REASONS[life.state]
    states = {engine.health().state for engine in engines}
    if len(engines) > 1 and states & {EngineState.READY, EngineState.SLEEPING}:
        return "ok", ""  # of several models one that fails takes no other down: /v1/models tells of each
    if EngineState.DEAD in states:
        return "dead", REASONS[LifeState.DEAD]
    if EngineState.STUCK in states:
        return "stuck", _STUCK
    if EngineState.STARTING in states:  # of several replicas none is left, and the first is being started again
        return "starting", REASONS[LifeState.STARTING]
    return "ok", ""


def routes(context: ServerContext) -> list[Route]:
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def health(request: HttpRequest) -> Response:
        status, reason = status_of(context.life, *(served.engine for served in context.models))
        headers = {"cache-control": "no-store"}
        if status == "ok":
            return JSONResponse({"status": status}, headers=headers)
        headers["retry-after"] = str(RETRY_AFTER_S)
        return JSONResponse({"status": status, "reason": reason}, 503, headers)

    return [Route("/health", health, methods=["GET"]), Route("/ping", health, methods=["GET", "POST"])]
