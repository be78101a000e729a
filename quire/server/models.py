"""Which models there are: one, under one or several names."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

import quire
from quire.server.errors import ApiError, shown
from quire.server.replies import Model, ModelList, Version

if TYPE_CHECKING:
    from quire.engine.api import EngineInfo
    from quire.server.context import ServerContext


def model_names(context: ServerContext) -> tuple[str, ...]:
    return context.settings.served_model_names or (context.engine.info.model,)


def check_model(context: ServerContext, name: str | None) -> str:
    """The name to answer under. Raises a 404 for a model that is not here."""
    names = model_names(context)
    if name is None:
        return names[0]
    if name not in names:
        raise ApiError(
            404,
            f"the model {shown(name)!r} is not here: use {' or '.join(repr(known) for known in names)}",
            param="model",
            code="model_not_found",
        )
    return name


def fingerprint(info: EngineInfo) -> str:
    """Changes with whatever may change an answer to the same request."""
    parts = (info.model, info.architecture, info.device, info.dtype, info.kv_dtype, info.kernels)
    return f"quire-{quire.__version__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def routes(context: ServerContext) -> list[Route]:
    created = int(time.time())

    def describe(name: str) -> Model:
        info = context.engine.info
        return Model(id=name, created=created, root=info.model, max_model_len=info.max_model_len)

    def json(body: msgspec.Struct) -> Response:
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def list_models(_: HttpRequest) -> Response:
        return json(ModelList(data=[describe(name) for name in model_names(context)]))

    async def show_model(request: HttpRequest) -> Response:
        return json(describe(check_model(context, request.path_params["model"])))

    async def version(_: HttpRequest) -> Response:
        return json(Version(quire.__version__))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", show_model, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
    ]
