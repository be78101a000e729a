"""Which models there are, each under one or several names."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

import quire
from quire.server.endpoint import json_response
from quire.server.replies import Model, ModelList, Version

if TYPE_CHECKING:
    from quire.engine.api import EngineInfo
    from quire.server.context import ServedModel, ServerContext


def fingerprint(info: EngineInfo) -> str:
    """Changes with whatever may change an answer to the same request."""
    parts = (info.model, info.architecture, info.device, info.dtype, info.kv_dtype, info.kernels)
    return f"quire-{quire.__version__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def routes(context: ServerContext) -> list[Route]:
    created = int(time.time())

    def describe(served: ServedModel, name: str, adapter: str | None = None) -> Model:
        info, state = served.engine.info, served.engine.health().state.value
        root = info.model if adapter is None else served.adapters[adapter].path
        parent = None if adapter is None else served.names[0]
        return Model(
            id=name,
            created=created,
            root=root,
            parent=parent,
            max_model_len=info.max_model_len,
            state=state,
            fingerprint=info.fingerprint,
        )

    async def list_models(_: HttpRequest) -> Response:
        return json_response(ModelList(data=[describe(*asked) for asked in context.choices()]))

    async def show_model(request: HttpRequest) -> Response:
        return json_response(describe(*context.find(request.path_params["model"])))

    async def version(_: HttpRequest) -> Response:
        return json_response(Version(quire.__version__))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", show_model, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
    ]
