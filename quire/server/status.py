"""What the server tells of itself: whether it is well, how busy it is, and which models it has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

import quire
from quire.engine.api import EngineState, ServingEngine
from quire.server.endpoint import json_response
from quire.server.errors import RETRY_SOON
from quire.server.life import REASONS, LifeState, ServerLife
from quire.server.replies import Model, ModelList, Version

if TYPE_CHECKING:
    from quire.server.context import Asked, ServerContext

_STUCK = "a step of the engine takes longer than the watchdog allows"
_CREATED = int(time.time())  # when the models came to be here


def status_of(life: ServerLife, *engines: ServingEngine) -> tuple[str, str]:
    """A word and a sentence: ok, starting, draining, dead or stuck."""
    if life.state is not LifeState.SERVING:
        return life.state.value, REASONS[life.state]
    states = {engine.health().state for engine in engines}
    if len(engines) > 1 and states & {EngineState.READY, EngineState.SLEEPING}:
        return "ok", ""  # one of several models that fails takes no other down: /v1/models has the state of each
    if EngineState.DEAD in states:
        return "dead", REASONS[LifeState.DEAD]
    if EngineState.STUCK in states:
        return "stuck", _STUCK
    if EngineState.STARTING in states:  # no replica is left, and the first is being started again
        return "starting", REASONS[LifeState.STARTING]
    return "ok", ""


async def show_health(context: ServerContext, _: HttpRequest) -> Response:
    """200 while the engine is idle or makes progress, else 503."""
    # Anyone may read it, so the reasons are fixed sentences: details are in the log.
    status, reason = status_of(context.life, *(served.engine for served in context.models))
    headers = {"cache-control": "no-store"}
    if status == "ok":
        return JSONResponse({"status": status}, headers=headers)
    return JSONResponse({"status": status, "reason": reason}, 503, headers | RETRY_SOON)


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


async def show_load(context: ServerContext, request: HttpRequest) -> Response:
    """How busy the server is, in one small object; with several models, each under its name too."""
    num_in_flight = context.life.num_in_flight
    if len(context.models) == 1 or "model" in request.query_params:
        return JSONResponse(load_report(context.choose(request).engine, num_in_flight))
    each = {served.names[0]: load_report(served.engine, served.num_in_engine) for served in context.models}
    total: dict[str, Any] = {"server_load": num_in_flight}
    for name in ("num_running", "num_waiting", "num_waiting_tokens", "tokens_per_s"):
        total[name] = round(sum(report[name] for report in each.values()), 1)
    return JSONResponse(total | {"models": each})


def _describe(asked: Asked) -> Model:
    served = asked.served
    info, adapter = served.engine.info, asked.adapter_ref
    return Model(
        id=asked.name,
        created=_CREATED,
        root=info.model if adapter is None else adapter.path,
        parent=None if adapter is None else served.names[0],
        max_model_len=info.max_model_len,
        state=served.engine.health().state.value,
        fingerprint=info.fingerprint,
    )


async def list_models(context: ServerContext, _: HttpRequest) -> Response:
    """List the models and adapters that a request may name."""
    return json_response(ModelList(data=[_describe(asked) for asked in context.choices()]))


async def show_model(context: ServerContext, request: HttpRequest) -> Response:
    """Describe one model or adapter."""
    return json_response(_describe(context.find(request.path_params["model"])))


async def show_version(_: ServerContext, __: HttpRequest) -> Response:
    """Tell Quire's version."""
    return json_response(Version(quire.__version__))
