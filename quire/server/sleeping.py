"""Putting models to sleep and waking them, as vLLM has it, and having more or fewer of them while the server runs.

    POST  /sleep?model=a&level=1&keep_kv=false   level 2 ends the engine's process, too; without model, all of them
    POST  /wake_up?model=a
    GET   /is_sleeping?model=a
    POST  /v1/models/load     {"model": "./path or hub id", "name": "b", "memory_share": 0.3, "settings": {...}}
    POST  /v1/models/unload   {"model": "b"}

Nobody has to wake a model: a request does. As with replicas, all of it is for an admin's key, or the only key, or
without keys for a local address.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.server.errors import ApiError, bad_request
from quire.server.residents import ResidentEngine, Residents

if TYPE_CHECKING:
    from quire.server.context import ServedModel, ServerContext

_LEAST_SHARE = 0.01
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    name: str | None = None  # that clients ask for; None: as `model` has it
    memory_share: float | None = None  # None: what the other models leave
    settings: dict[str, Any] = {}  # the engine's, by the names that LLM takes, over those of the server's first model


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str


def _chosen(context: ServerContext, request: HttpRequest, *known: str) -> list[tuple[ServedModel, ResidentEngine]]:
    """The models that a request is for. Raises where it brings what is not known."""
    for name in request.query_params:
        if name not in ("model", *known):
            raise bad_request(f"{request.url.path} has no parameter {name}: see /docs", param=name)
    served = [context.choose(request)] if "model" in request.query_params else list(context.models)
    return [(one, _resident(one)) for one in served]


async def sleep(context: ServerContext, request: HttpRequest) -> Response:
    """Put a model to sleep, or all: its memory is given back until a request wakes it. For an admin."""
    engines = _chosen(context, request, "level", "keep_kv")
    level, keep_kv = request.query_params.get("level", "1"), request.query_params.get("keep_kv", "false").lower()
    if level not in ("1", "2"):
        raise bad_request("level is 1, which keeps the weights in host memory, or 2, which keeps nothing", "level")
    if keep_kv not in _BOOLEANS or (_BOOLEANS[keep_kv] and level == "2"):
        raise bad_request("keep_kv is true or false, and true at level 1 only", "keep_kv")
    for _, engine in engines:
        await _residents(context).sleep(
            engine, int(level), keep_kv=_BOOLEANS[keep_kv], within_s=context.settings.drain_timeout_s
        )
    return JSONResponse(_states(engines))


async def wake_up(context: ServerContext, request: HttpRequest) -> Response:
    """Wake a model, or all, before a request does. For an admin."""
    engines = _chosen(context, request)
    for _, engine in engines:
        async with engine.in_use():
            pass
    return JSONResponse(_states(engines))


async def is_sleeping(context: ServerContext, request: HttpRequest) -> Response:
    """Whether a model sleeps, or all do."""
    return JSONResponse({"is_sleeping": all(engine.sleep_level for _, engine in _chosen(context, request))})


async def load_model(context: ServerContext, _: HttpRequest, body: LoadBody) -> Response:
    """Serve one more model. For an admin."""
    served = await _load(context, body)
    return JSONResponse({"id": served.names[0], "state": served.engine.health().state.value})


async def unload_model(context: ServerContext, _: HttpRequest, body: UnloadBody) -> Response:
    """Let a model's requests end, and then its engine. For an admin."""
    served = context.find(body.model).served
    if len(context.models) == 1:
        raise bad_request("it is the only model: load another first, or stop the server", "model")
    await _residents(context).unload(_resident(served), within_s=context.settings.drain_timeout_s)
    context.models.remove(served)
    return JSONResponse({"id": served.names[0], "state": "unloaded"})


def _states(engines: list[tuple[ServedModel, ResidentEngine]]) -> dict[str, Any]:
    return {"models": {served.names[0]: engine.health().state.value for served, engine in engines}}


def _residents(context: ServerContext) -> Residents:
    if context.residents is None:
        raise bad_request("the models of this server do not change", code="fixed_models")
    return context.residents


def _resident(served: ServedModel) -> ResidentEngine:
    if not isinstance(served.engine, ResidentEngine):
        raise bad_request(f"{served.names[0]} has replicas, which do not sleep: leave out -dp", code="replicated")
    return served.engine


async def _load(context: ServerContext, body: LoadBody) -> ServedModel:
    """Start one more model beside those that serve."""
    from quire.server.context import ServedModel
    from quire.server.run import process_options, settle_config

    residents, first = _residents(context), _resident(context.first)
    share = body.memory_share
    if share is None:
        share = residents.free_share()
        if share < _LEAST_SHARE:
            raise bad_request(
                "the models here may take all of the memory: give this one a memory_share, and they take turns",
                "memory_share",
            )
    for name in body.settings:
        if name in ("model", "memory_share"):
            raise bad_request(f"{name} stands beside settings, not in it", f"settings.{name}")
    try:
        given = {name: getattr(first.config, name) for name in first.config.given} | body.settings
        config = EngineConfig(**given | {"model": body.model, "memory_share": share})
        config = settle_config(config, is_alone=False)
        residents.restarts = True  # there are several now: one that fails takes no other down
        engine = ResidentEngine(config, process_options(context.settings), residents)
        served = ServedModel.of((body.name or body.model,), engine, context.settings, context.life)
        try:
            context.check_names(served)
            await engine.ready()
            context.add(served)
        except BaseException:
            await asyncio.shield(engine.close(0.0))
            raise
    except QuireError as error:  # told as it is: an operator asks
        raise ApiError(400, f"{body.model} cannot be served: {error}", param="model", code="not_loaded") from None
    return served
