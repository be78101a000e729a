"""The application: every route, behind its guards. What a path takes and gives is in `openapi.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from quire.errors import QuireError
from quire.server import (
    adapters,
    batches,
    cache_hashes,
    debug,
    guards,
    health,
    kv_levels,
    live,
    load,
    messages,
    metrics,
    models,
    pooled,
    replicas,
    responses,
    sleeping,
)
from quire.server.chat import create_chat
from quire.server.completions import create_completion
from quire.server.docs_page import docs_page
from quire.server.endpoint import JsonEndpoint
from quire.server.errors import ApiError, any_error, http_error
from quire.server.openapi import openapi_document
from quire.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quire.server.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from quire.server.context import ServerContext

_POSTS: dict[str, tuple[Any, ...]] = {
    "/v1/completions": (CompletionBody, create_completion),
    "/v1/chat/completions": (ChatBody, create_chat),
    "/v1/responses": (responses.ResponsesBody, responses.create_response),
    "/v1/messages": (messages.MessagesBody, messages.create_message, messages.error_body),
    "/v1/messages/count_tokens": (messages.CountTokensBody, messages.count_message_tokens, messages.error_body),
    **pooled.POSTS,
    "/tokenize": (TokenizeBody, tokenize),
    "/detokenize": (DetokenizeBody, detokenize),
}
# The page brings its style with it and needs nothing else.
_DOCS_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}


def post_endpoints(context: ServerContext) -> dict[str, JsonEndpoint]:
    return {path: JsonEndpoint(context, *parts) for path, parts in _POSTS.items()}


def create_app(context: ServerContext) -> Starlette:
    endpoints = post_endpoints(context)
    posts = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    parts: tuple[Any, ...] = (
        sleeping,
        models,
        adapters,
        health,
        metrics,
        load,
        live,
        debug,
        kv_levels,
        replicas,
        cache_hashes,
        responses,
    )
    return Starlette(
        routes=[
            *posts,
            *batches.routes(context, endpoints),
            *(route for part in parts for route in part.routes(context)),
            *_document_routes(),
        ],
        middleware=guards.middleware(context),
        exception_handlers={
            HTTPException: http_error,
            ApiError: any_error,
            QuireError: any_error,
            Exception: any_error,
        },
    )


def _document_routes() -> list[Route]:
    document = msgspec.json.encode(openapi_document())
    page = docs_page(openapi_document())

    async def openapi(_: HttpRequest) -> Response:
        return Response(document, media_type="application/json")

    async def docs(_: HttpRequest) -> Response:
        return HTMLResponse(page, headers=_DOCS_HEADERS)

    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]
