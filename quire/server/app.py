"""The application: every path of `paths.py`, behind its guards."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import QuireError
from quire.server import guards, page
from quire.server.endpoint import JsonEndpoint, check_json
from quire.server.errors import ApiError, any_error, http_error
from quire.server.openapi import docs_page, openapi_document
from quire.server.paths import OPERATIONS, Operation
from quire.server.protocol import BodyDecoder

if TYPE_CHECKING:
    from quire.server.context import ServerContext

# The page brings its style with it and needs nothing else.
_DOCS_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}


def create_app(context: ServerContext) -> ASGIApp:
    """The server's application. Requests for its endpoints do not pass through Starlette's: they answer their errors
    themselves, and are found by their path."""
    context.answering = answering(context)
    every_route = routes(context)
    endpoints = {
        route.path: route.endpoint
        for route in every_route
        if isinstance(route, Route) and isinstance(route.endpoint, JsonEndpoint)
    }
    rest = Starlette(
        routes=every_route,
        exception_handlers={
            HTTPException: http_error,
            ApiError: any_error,
            QuireError: any_error,
            Exception: any_error,
        },
    )

    def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = endpoints.get(scope["path"]) if is_post else None
        return (endpoint or rest)(scope, receive, send)

    return guards.guarded(app, context)


def routes(context: ServerContext) -> list[BaseRoute]:
    operations = (op for ops in OPERATIONS.values() for op in ops)
    return [*(make_route(op, context) for op in operations), *page.routes(), *_document_routes()]


def answering(context: ServerContext) -> dict[str, JsonEndpoint]:
    """The endpoints that a file of requests may name, by path."""
    return {
        op.path: _json_endpoint(op, context)
        for tag, ops in OPERATIONS.items()
        for op in ops
        if op.is_endpoint and op.path.startswith("/v1/") and tag != "Batches"
    }


def make_route(op: Operation, context: ServerContext) -> Route:
    """An operation, with the context that its handler is given."""
    if op.is_endpoint:
        return Route(op.path, _json_endpoint(op, context), methods=[op.method])
    decoder = None if op.body is None else BodyDecoder(op.body)

    async def answer(request: HttpRequest) -> Response:
        if op.for_admin or op.changes:
            _check_admin(op, context, request)
        given: list[Any] = []
        if decoder is not None:
            check_json(request.headers.get("content-type", ""))
            given.append(decoder.decode(await request.body()))
        answered: Response = await op.handler(context, request, *given)
        return answered

    return Route(op.path, answer, methods=[op.method])


def _json_endpoint(op: Operation, context: ServerContext) -> JsonEndpoint:
    assert op.body is not None, "an endpoint takes a body"
    return JsonEndpoint(context, op.body, op.handler, op.error_body)


def _check_admin(op: Operation, context: ServerContext, request: HttpRequest) -> None:
    """An admin's key, or the only key, may see everybody's requests. To change something takes a key at all."""
    if request.scope["state"]["sees"] is not None:
        raise ApiError(403, "this is for an admin's key: see --api-key-file", code="admin_only")
    if op.changes and not context.settings.api_keys and not context.settings.is_local:
        raise ApiError(403, f"{op.changes} with an API key: start the server with one", code="no_key")


def _document_routes() -> list[Route]:
    document = msgspec.json.encode(openapi_document())
    shown = docs_page(openapi_document())

    async def openapi(_: HttpRequest) -> Response:
        return Response(document, media_type="application/json")

    async def docs(_: HttpRequest) -> Response:
        return HTMLResponse(shown, headers=_DOCS_HEADERS)

    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]
