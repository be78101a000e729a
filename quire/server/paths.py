"""Every path that the server answers, once: `app.py` makes routes of this table, and `openapi.py` the document.

The document describes a path by its handler's docstring, and its body by the type in the handler's annotation.
There are three kinds of handlers, which their parameters tell apart:

    (exchange, body)           takes JSON and answers by itself (`endpoint.JsonEndpoint`), with metrics and log lines
    (context, request)         gives a Response
    (context, request, body)   the same, and takes JSON
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server import admin, batches, cache_hashes, messages, pooled, responses
from quire.server.chat import create_chat
from quire.server.completions import create_completion
from quire.server.deadline import TIMEOUT_HEADER
from quire.server.debug import KVDebug, answers
from quire.server.endpoint import REQUEST_ID_HEADER
from quire.server.errors import ApiError
from quire.server.feed import MEDIA_TYPE, show_live
from quire.server.metrics import show_metrics
from quire.server.pooled_bodies import ClassesList, Embeddings, PooledList, RerankList, ScoreList
from quire.server.replies import ChatCompletion, Completion, Model, ModelList, Text, Tokens, Version
from quire.server.status import list_models, show_health, show_load, show_model, show_version
from quire.server.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from quire.server.context import ServerContext

AnyHandler = Callable[..., Any]
Handler = Callable[["ServerContext", HttpRequest], Awaitable[Response]]
Parameter = tuple[str, str, str]  # name, where, meaning
Body = type[msgspec.Struct]


@dataclass(slots=True, frozen=True)
class Operation:
    method: str
    path: str  # as Starlette has it
    handler: AnyHandler
    parameters: tuple[Parameter, ...] = ()
    _: KW_ONLY
    reply: Body | None = None
    reply_type: str = "application/json"
    errors: tuple[int, ...] = ()  # statuses, beside those that any path may have
    generates: bool = False  # text, and can stream it
    error_body: Callable[[ApiError], Any] = ApiError.body  # how this path's clients read errors
    for_admin: bool = False
    changes: str = ""  # what it does, where that takes a key, unless the server listens on this machine alone

    @property
    def summary(self) -> str:
        return " ".join((self.handler.__doc__ or "").split())

    @property
    def is_endpoint(self) -> bool:
        """Whether the handler takes an exchange and answers by itself."""
        return "exchange" in _parameter_types(self.handler)

    @property
    def body(self) -> Body | None:
        return _parameter_types(self.handler).get("body")


@cache
def _parameter_types(handler: AnyHandler) -> dict[str, Any]:
    return get_type_hints(handler, localns={"ServerContext": Any})  # that name is there for type checkers alone


_MODEL = ("model", "query", "Which of several models; without it the first.")
_WHICH = (_MODEL, ("engine", "query", "Which replica; without it the first."))
_LIMIT = ("limit", "query", "How many at most.")
_OFFSET = ("offset", "query", "How many to pass over.")
_PAGE = (("after", "query", "Begin behind this id."), _LIMIT)
_ID = (REQUEST_ID_HEADER, "header", "Up to 128 visible ASCII characters; returned, and in the log.")
_TIMEOUT = (TIMEOUT_HEADER, "header", "As the field `timeout`, which goes first.")
_RESPONSE, _FILE, _BATCH = ((("id", "path", f"The {kind}'s id."),) for kind in ("response", "file", "batch"))
_SLEEP = (
    _MODEL,
    ("level", "query", "1: the weights go to host memory; 2: the engine's process ends."),
    ("keep_kv", "query", "true: cached prefixes are kept, in host memory."),
)
_TREE = (("node", "query", "Where to begin."), ("depth", "query", "How deep."), _OFFSET, _LIMIT)
_SINCE = (("since", "query", "As the last answer had it; without it, everything."),)
_WITH_BODY = (400, 404, 408, 413, 415)
_KEPT = (400, 404, 501)  # errors of paths of files and batches
_TEXT, _BYTES = "text/plain", "application/octet-stream"


def _endpoint(path: str, handler: AnyHandler, reply: Body | None = None, **others: Any) -> Operation:
    """An operation that takes a body and answers at once."""
    others["errors"] = (*_WITH_BODY, *others.get("errors", ()))
    return Operation("post", path, handler, (_ID,), reply=reply, **others)


def _running(path: str, handler: AnyHandler, reply: Body | None = None, **others: Any) -> Operation:
    """An operation that takes a body and needs the engine: it may have to wait, and has a timeout."""
    return replace(_endpoint(path, handler, reply, errors=(429, 504), **others), parameters=(_ID, _TIMEOUT))


def _change(path: str, handler: AnyHandler, what: str, *errors: int, **others: Any) -> Operation:
    """An operation that takes a body and changes something of the server."""
    return Operation("post", path, handler, changes=what, errors=(400, 404, 415, *errors), **others)


def _pooled(handler: AnyHandler, reply: Body, *paths: str) -> tuple[Operation, ...]:
    return tuple(_running(path, handler, reply) for path in paths)


def _debug(
    path: str, handler: Callable[[KVDebug, HttpRequest], Awaitable[Response]], *parameters: Parameter
) -> Operation:
    """A look into the KV cache of the model and the engine that a request names."""
    return Operation("get", f"/debug/kv{path}", answers(handler), (*parameters, *_WHICH), errors=(400, 404))


# By the sections of the document.
OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "OpenAI": (
        _running("/v1/completions", create_completion, Completion, generates=True),
        _running("/v1/chat/completions", create_chat, ChatCompletion, generates=True),
        _running("/v1/responses", responses.create_response, generates=True),
        Operation("get", "/v1/responses/{id}", responses.show_response, _RESPONSE, errors=(404,)),
        Operation("delete", "/v1/responses/{id}", responses.delete_response, _RESPONSE, errors=(404,)),
        Operation("post", "/v1/responses/{id}/cancel", responses.cancel_response, _RESPONSE, errors=(404, 409)),
        Operation("get", "/v1/models", list_models, reply=ModelList),
        Operation(
            "get", "/v1/models/{model:path}", show_model, (("model", "path", "Its name."),), reply=Model, errors=(404,)
        ),
        _running("/v1/embeddings", pooled.create_embeddings, Embeddings),
        _change("/v1/load_lora_adapter", admin.load_lora_adapter, "adapters are loaded", reply_type=_TEXT),
        _change("/v1/unload_lora_adapter", admin.unload_lora_adapter, "adapters are loaded", reply_type=_TEXT),
    ),
    "Anthropic": (
        _running("/v1/messages", messages.create_message, generates=True, error_body=messages.error_body),
        _endpoint("/v1/messages/count_tokens", messages.count_message_tokens, error_body=messages.error_body),
    ),
    "Pooling": (
        *_pooled(pooled.create_ranking, RerankList, "/v1/rerank", "/v2/rerank", "/rerank"),
        *_pooled(pooled.create_scores, ScoreList, "/v1/score", "/score"),
        *_pooled(pooled.create_classes, ClassesList, "/v1/classify", "/classify"),
        *_pooled(pooled.create_pooling, PooledList, "/v1/pooling", "/pooling"),
    ),
    "Tokens": (
        _endpoint("/tokenize", tokenize, Tokens),
        _endpoint("/detokenize", detokenize, Text),
    ),
    "Batches": (
        Operation("get", "/v1/files", batches.list_files, _PAGE, errors=_KEPT),
        Operation("post", "/v1/files", batches.upload_file, errors=(*_KEPT, 408, 413, 415)),
        Operation("get", "/v1/files/{id}", batches.show_file, _FILE, errors=_KEPT),
        Operation("delete", "/v1/files/{id}", batches.delete_file, _FILE, errors=(*_KEPT, 409)),
        Operation("get", "/v1/files/{id}/content", batches.show_content, _FILE, errors=_KEPT, reply_type=_BYTES),
        Operation("get", "/v1/batches", batches.list_batches, _PAGE, errors=_KEPT),
        _endpoint("/v1/batches", batches.create_batch, batches.Batch, errors=(429, 501)),
        Operation("get", "/v1/batches/{id}", batches.show_batch, _BATCH, reply=batches.Batch, errors=_KEPT),
        Operation(
            "post", "/v1/batches/{id}/cancel", batches.cancel_batch, _BATCH, reply=batches.Batch, errors=(*_KEPT, 409)
        ),
    ),
    "Operation": (
        Operation("get", "/health", show_health),
        Operation("get", "/ping", show_health),
        Operation("post", "/ping", show_health),
        Operation("get", "/version", show_version, reply=Version),
        Operation("get", "/load", show_load, (_MODEL,), errors=(404,)),
        Operation("post", "/sleep", admin.sleep, _SLEEP, errors=(400, 404, 409), changes="models are put to sleep"),
        Operation("post", "/wake_up", admin.wake_up, (_MODEL,), errors=(400, 404), changes="models are woken"),
        Operation("get", "/is_sleeping", admin.is_sleeping, (_MODEL,), errors=(400, 404)),
        _change("/v1/models/load", admin.load_model, "models are loaded"),
        _change("/v1/models/unload", admin.unload_model, "models are unloaded", 409),
        Operation("get", "/metrics", show_metrics, reply_type=_TEXT),
    ),
    "Cache": (
        Operation("get", "/live", show_live, _WHICH, reply_type=MEDIA_TYPE, errors=(400, 404, 429)),
        _debug("", KVDebug.index, ("full", "query", "1: the first page of the rest too.")),
        _debug("/map", KVDebug.block_map, ("first", "query", "The first block."), _LIMIT),
        _debug("/requests", KVDebug.requests, _OFFSET, _LIMIT),
        _debug("/sharing", KVDebug.sharing, _LIMIT),
        _debug("/tree", KVDebug.tree, *_TREE),
        _debug("/blocks/{block}", KVDebug.block, ("block", "path", "Its number.")),
        Operation("get", "/debug/kv/levels", admin.show_levels, _WHICH, errors=(404,), for_admin=True),
        _change("/debug/kv/levels", admin.change_levels, "the KV cache is changed", parameters=_WHICH),
        Operation(
            "get", "/debug/cache", cache_hashes.show_changes, _SINCE, errors=(400, 404), changes="hashes are told"
        ),
        _endpoint("/debug/cache/hashes", cache_hashes.make_hashes, cache_hashes.BlockHashes, errors=(429, 504)),
        Operation("get", "/debug/replicas", admin.show_replicas, for_admin=True),
        _change("/debug/replicas", admin.change_replicas, "replicas are changed"),
    ),
}
