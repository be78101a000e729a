"""`/load`: how busy this server is, for balancers and autoscalers that want one small JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from quire.engine.api import ServingEngine

if TYPE_CHECKING:
    from quire.server.context import ServerContext


def load_report(engine: ServingEngine, num_in_flight: int) -> dict[str, Any]:
    """`server_load` is vLLM's name for the requests in hand; the rest is the engine's view, a moment old."""
    load = engine.load()
    return {
        "server_load": num_in_flight,
        "state": engine.health().state.value,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_waiting_tokens": load.num_waiting_tokens,
        "kv_usage": round(load.kv_usage, 4),
        "tokens_per_s": round(load.tokens_per_s, 1),
        "brownout_level": load.brownout_level,
    }


def routes(context: ServerContext) -> list[Route]:
    async def load(request: HttpRequest) -> JSONResponse:
        """Of one model, which ?model= names; of several, what they have together, and each under its name."""
        num_in_flight = context.life.num_in_flight
        if len(context.models) == 1 or "model" in request.query_params:
            return JSONResponse(load_report(context.choose(request).engine, num_in_flight))
        each = {served.names[0]: load_report(served.engine, served.num_in_engine) for served in context.models}
        total: dict[str, Any] = {"server_load": num_in_flight}
        for name in ("num_running", "num_waiting", "num_waiting_tokens", "tokens_per_s"):
            total[name] = round(sum(report[name] for report in each.values()), 1)
        return JSONResponse(total | {"models": each})

    return [Route("/load", load, methods=["GET"])]
