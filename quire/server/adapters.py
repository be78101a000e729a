"""Adapters of the models that are served: which there are at start, and vLLM's two paths to have others.

    POST /v1/load_lora_adapter     {"lora_name": "pirate", "lora_path": "/adapters/pirate", "load_inplace": false}
    POST /v1/unload_lora_adapter   {"lora_name": "pirate"}

An adapter is read and checked by the engine before its name is known here. Requests that name it bring its key with
them, so those that run when it is unloaded go on. To change something takes a key at all, an admin's where there are
several, unless the server listens on this machine alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from quire.errors import BadRequestError, ConfigError, DownloadError, ModelError
from quire.request import AdapterRef
from quire.server.errors import ApiError, bad_request, shown
from quire.server.settings import LoraModule

if TYPE_CHECKING:
    from quire.server.context import ServedModel, ServerContext

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
    """Those that the operator named. A ConfigError names the one that cannot be served."""
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
