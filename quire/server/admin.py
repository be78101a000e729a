"""What an operator changes while the server runs: models, adapters, replicas, and prompts in the KV cache's levels.

    POST  /sleep?model=a&level=1&keep_kv=false   level 2 ends the engine's process, too; without model, all of them
    POST  /wake_up?model=a
    GET   /is_sleeping?model=a
    POST  /v1/models/load           {"model": "./path or hub id", "name": "b", "memory_share": 0.3, "settings": {...}}
    POST  /v1/models/unload         {"model": "b"}
    POST  /v1/load_lora_adapter     {"lora_name": "pirate", "lora_path": "/adapters/pirate", "load_inplace": false}
    POST  /v1/unload_lora_adapter   {"lora_name": "pirate"}
    GET   /debug/replicas           every replica with its load, and how many the load wants
    POST  /debug/replicas           {"action": "add"}, or {"action": "drain" | "undrain" | "remove", "engine": "1"}
    GET   /debug/kv/levels          by level: blocks, what was stored, loaded and rejected, bytes moved, age
    POST  /debug/kv/levels          {"action": "warm" | "pin" | "unpin" | "expire", "prompt": text or token ids}, or
                                    {"action": "expire", "older_than_s": 86400}

All of it is for an admin's key, or the only key. Changing something takes a key at all, unless the server listens on
this machine alone. A request wakes its model by itself, and blocks that are not used sink through the levels and leave
by themselves: both need no operator. `warm` computes a prompt, or loads it, before a user asks; `pin` does so and keeps
it on the device; `expire` forgets it in every level.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quire.config import EngineConfig
from quire.engine.api import PreparedRequest, ServingEngine, is_replicated, replicas_of
from quire.errors import BadRequestError, ConfigError, DownloadError, ModelError, QuireError
from quire.params import SamplingParams
from quire.request import AdapterRef
from quire.router.replicas import ReplicaSet
from quire.router.scaling import desired_replicas
from quire.server.errors import ApiError, bad_request, shown
from quire.server.residents import ResidentEngine, Residents
from quire.server.settings import LoraModule

if TYPE_CHECKING:
    from quire.server.context import ServedModel, ServerContext

# -- models

_LEAST_SHARE = 0.01
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    name: str | None = None  # under which clients ask for the model; None: as `model` has it
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


# -- adapters: a request brings the key of the one it names, so that those under way when it is unloaded go on

MAX_ADAPTERS = 1000  # names: of each only its key is kept here


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str = ""
    lora_int_id: int | None = None


async def load_lora_adapter(context: ServerContext, _: HttpRequest, body: LoadAdapterBody) -> Response:
    """Read an adapter from the server's disk or the hub, and serve it as a model of its name. For an admin."""
    if not body.lora_name or not body.lora_path:
        raise bad_request("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
    module = LoraModule(body.lora_name, body.lora_path, body.base_model_name)
    await load_adapter(context, module, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(context: ServerContext, _: HttpRequest, body: UnloadAdapterBody) -> Response:
    """An adapter's name is gone; requests that run with it finish. For an admin."""
    if not body.lora_name:
        raise bad_request("'lora_name' must be provided: adapters go by their names here.", "lora_name")
    served = next((one for one in context.models if body.lora_name in one.adapters), None)
    if served is None:
        there = ", ".join(name for one in context.models for name in one.adapters) or "none is loaded"
        message = f"The lora adapter {shown(body.lora_name)!r} cannot be found ({there})."
        raise ApiError(404, message, param="lora_name", code="adapter_not_found")
    del served.adapters[body.lora_name]
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def load_adapter(context: ServerContext, module: LoraModule, *, in_place: bool = False) -> None:
    """Have the engine read it; from then on its name is a model's. Raises an ApiError, and then nothing has changed."""
    served = context.find(module.base_model_name).served
    _check_name(context, served, module.name, in_place=in_place)
    try:
        found = await served.engine.call("read_adapter", adapter=module.name, path=module.path)
    except (ModelError, DownloadError) as error:
        raise bad_request(str(error), "lora_path", code="bad_adapter") from None
    _check_name(context, served, module.name, in_place=in_place)  # another request may have been first
    served.adapters[module.name] = AdapterRef(found["key"], module.path)


async def load_at_start(context: ServerContext) -> None:
    """Load the adapters that the operator named. A ConfigError names the one that cannot be served."""
    for module in context.settings.lora_modules:
        try:
            await load_adapter(context, module)
        except (ApiError, BadRequestError) as error:
            raise ConfigError(f"lora_modules: {module.name}: {error}") from None


def _check_name(context: ServerContext, served: ServedModel, name: str, *, in_place: bool) -> None:
    if name in served.adapters:
        if not in_place:
            raise bad_request(
                f"The lora adapter {shown(name)!r} has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True.",
                "lora_name",
            )
    elif any(asked.name == name for asked in context.choices()):
        raise bad_request(f"{shown(name)!r} is the name of a model: choose another", "lora_name")
    elif len(served.adapters) >= MAX_ADAPTERS:
        raise bad_request(f"there are {MAX_ADAPTERS} adapters already: unload one", "lora_name")


# -- replicas

_MAX_REPLICAS = 64


class ReplicasBody(msgspec.Struct, forbid_unknown_fields=True):
    action: Literal["add", "drain", "undrain", "remove"]
    engine: str | None = None


def _replicas_report(context: ServerContext) -> dict[str, Any]:
    engine = context.first.engine
    loads = [replica.load() for replica in replicas_of(engine).values()]
    shown = engine.describe() if isinstance(engine, ReplicaSet) else [{"engine": "0"}]
    moved = engine.num_moved if isinstance(engine, ReplicaSet) else 0
    return {"replicas": shown, "num_moved_requests": moved, "desired_replicas": desired_replicas(loads)}


async def show_replicas(context: ServerContext, _: HttpRequest) -> Response:
    """The engines behind this server, and how many the load wants. For an admin."""
    return JSONResponse(_replicas_report(context), headers={"cache-control": "no-store"})


async def change_replicas(context: ServerContext, _: HttpRequest, body: ReplicasBody) -> Response:
    """Add, drain or remove an engine while serving: no request is lost. For an admin."""
    engine = context.first.engine
    if not is_replicated(engine):
        raise bad_request("this server has one engine: start it with -dp 2 or more", code="one_engine")
    assert isinstance(engine, ReplicaSet)
    return JSONResponse({"engine": await _change_replicas(engine, body), **_replicas_report(context)})


async def _change_replicas(engine: ReplicaSet, body: ReplicasBody) -> str:
    if body.action == "add":
        if body.engine is not None:
            raise bad_request("a new replica is named by the server: leave engine out", param="engine")
        if len(engine.replicas) >= _MAX_REPLICAS:
            raise bad_request(f"there are {_MAX_REPLICAS} replicas already, the most that one server has")
        return await engine.add()
    if body.engine is None:
        raise bad_request(f"which replica? Send engine with {body.action}", param="engine")
    if body.action == "undrain":
        engine.undrain(body.engine)
    else:
        await (engine.drain if body.action == "drain" else engine.remove)(body.engine)
    return body.engine


# -- levels of the KV cache


class LevelsBody(msgspec.Struct, forbid_unknown_fields=True):
    action: Literal["warm", "pin", "unpin", "expire"]
    prompt: str | list[int] | None = None
    cache_salt: str | None = None
    tenant: str = ""  # the name of the key whose requests it is for, where there are several
    older_than_s: float | None = None


async def show_levels(context: ServerContext, request: HttpRequest) -> Response:
    """The device and the levels below it: blocks, what moved, what was found there. For an admin."""
    _, engine = context.choose(request).find_engine(request.query_params.get("engine"))
    return JSONResponse(await engine.call("kv_levels"), headers={"cache-control": "no-store"})


async def change_levels(context: ServerContext, request: HttpRequest, body: LevelsBody) -> Response:
    """Warm, pin, unpin or expire a prompt; or expire what was not used for some time. For an admin."""
    _, engine = context.choose(request).find_engine(request.query_params.get("engine"))
    known = context.settings.tenants
    if body.tenant and (len(known) < 2 or body.tenant not in known):
        raise bad_request("there is no such key: give the name of one of several, or leave it out", param="tenant")
    return JSONResponse(await _change_level(engine, body))


async def _change_level(engine: ServingEngine, body: LevelsBody) -> dict[str, Any]:
    if body.older_than_s is not None:
        if body.action != "expire" or body.prompt is not None or not 0 <= body.older_than_s < 1e12:
            raise bad_request("older_than_s is a time in seconds, for expire without a prompt", param="older_than_s")
        return {"num_blocks": await engine.call("expire_unused", older_than_s=body.older_than_s)}
    if body.prompt is None:
        raise bad_request(f"which prompt? Send prompt with {body.action}", param="prompt")
    if not engine.info.enable_prefix_caching:
        raise ApiError(400, "this server caches no prefixes: start it with prefix caching", code="no_cache")
    prepared = await asyncio.to_thread(_prepare_prompt, engine, body)
    request = prepared.request
    names = {"token_ids": request.prompt_token_ids, "salt": request.salt}
    if body.action == "unpin":
        return {"num_tokens": await engine.call("unpin_prefix", **names)}
    if body.action == "expire":
        return {"num_tokens": await engine.call("expire_prefix", **names)}
    async for _ in engine.stream(prepared):
        pass
    if body.action == "pin":
        return {"num_tokens": await engine.call("pin_cached", **names)}
    return {"num_tokens": prepared.num_prompt_tokens, "num_cached_tokens": prepared.num_cached_tokens}


def _prepare_prompt(engine: ServingEngine, body: LevelsBody) -> PreparedRequest:
    prompt: dict[str, Any] = {"prompt" if isinstance(body.prompt, str) else "prompt_token_ids": body.prompt}
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return engine.prepare(f"kv-{uuid.uuid4().hex}", prompt, params, tenant=body.tenant)
