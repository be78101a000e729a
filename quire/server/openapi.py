"""The OpenAPI 3.1 document: made from the very types that decode and encode the bodies, so that it cannot drift."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

import quire
from quire.refusals import FIELDS
from quire.server import messages, pooled, protocol, replies, responses
from quire.server.adapters import LoadAdapterBody, UnloadAdapterBody
from quire.server.batches import Batch, BatchBody
from quire.server.cache_hashes import BlockHashes, HashesBody
from quire.server.deadline import TIMEOUT_HEADER
from quire.server.endpoint import REQUEST_ID_HEADER
from quire.server.kv_levels import LevelsBody
from quire.server.replicas import ReplicasBody
from quire.server.sleeping import LoadBody, UnloadBody

_REF = "#/components/schemas/{name}"
_TEXT = "text/plain"
_STREAM = "text/event-stream"

_ERRORS = {
    400: "A field is wrong, unknown or not supported; `param` names it.",
    401: "No API key, or one that is not known.",
    403: "For an admin's key.",
    404: "No such model or path.",
    405: "The path does not take this method.",
    409: "It has ended, or is in use.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too much waits; `Retry-After` says when to come back.",
    500: "The server failed. Its log says why.",
    501: "The server was started without a folder for files (--batch-dir).",
    503: "The server is starting, draining, or has lost its engine.",
    504: "The request did not finish within its timeout.",
}
_ALWAYS = (401, 405, 500, 503)
_WITH_BODY = (400, 404, 408, 413, 415)
_GENERATING = (429, 504)


@dataclass(slots=True, frozen=True, kw_only=True)
class Operation:
    method: str
    path: str
    tag: str
    summary: str
    body: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None
    reply_type: str = "application/json"  # where the reply has no type of ours
    statuses: tuple[int, ...] = _ALWAYS
    parameters: tuple[tuple[str, str, str], ...] = ()  # (name, where, meaning); numbers are those of _NUMBERS
    generates: bool = False


_NUMBERS = {"limit", "offset", "first", "depth", "full", "block"}
_LIMIT = ("limit", "query", "How many at most.")
_OFFSET = ("offset", "query", "How many to pass over.")
_MODEL = ("model", "query", "Which of several models; without it the first.")
_WHICH = (_MODEL, ("engine", "query", "Which replica; without it the first."))
_ID = (REQUEST_ID_HEADER, "header", "Up to 128 visible ASCII characters; returned, and in the log.")
_TIMEOUT = (TIMEOUT_HEADER, "header", "As the field `timeout`, which goes first.")

_PAGE = (("after", "query", "Begin behind this id."), _LIMIT)
_FILE = (("id", "path", "The file's id."),)
_BATCH = (("id", "path", "The batch's id."),)
_RESPONSE = (("id", "path", "The response's id."),)
_KEPT = (*_ALWAYS, 400, 404, 501)

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/completions",
        tag="OpenAI",
        summary="Continue a text. With `stream`, as server-sent events that end with `data: [DONE]`.",
        body=protocol.CompletionBody,
        reply=replies.Completion,
        statuses=(*_ALWAYS, *_WITH_BODY, *_GENERATING),
        parameters=(_ID, _TIMEOUT),
        generates=True,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        tag="OpenAI",
        summary="Answer a conversation. With `stream`, as server-sent events that end with `data: [DONE]`.",
        body=protocol.ChatBody,
        reply=replies.ChatCompletion,
        statuses=(*_ALWAYS, *_WITH_BODY, *_GENERATING),
        parameters=(_ID, _TIMEOUT),
        generates=True,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        tag="OpenAI",
        summary="Answer a conversation, in the shape of OpenAI's Responses API.",
        body=responses.ResponsesBody,
        statuses=(*_ALWAYS, *_WITH_BODY, *_GENERATING),
        parameters=(_ID, _TIMEOUT),
        generates=True,
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}",
        tag="OpenAI",
        summary="A response that is remembered.",
        statuses=(*_ALWAYS, 404),
        parameters=_RESPONSE,
    ),
    Operation(
        method="delete",
        path="/v1/responses/{id}",
        tag="OpenAI",
        summary="Forget it.",
        statuses=(*_ALWAYS, 404),
        parameters=_RESPONSE,
    ),
    Operation(
        method="post",
        path="/v1/responses/{id}/cancel",
        tag="OpenAI",
        summary="End one that runs in the background.",
        statuses=(*_ALWAYS, 404, 409),
        parameters=_RESPONSE,
    ),
    Operation(
        method="post",
        path="/v1/messages",
        tag="Anthropic",
        summary="Answer a conversation, in the shape of Anthropic's Messages API.",
        body=messages.MessagesBody,
        statuses=(*_ALWAYS, *_WITH_BODY, *_GENERATING),
        parameters=(_ID, _TIMEOUT),
        generates=True,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        tag="Anthropic",
        summary="How many tokens a conversation has.",
        body=messages.CountTokensBody,
        statuses=(*_ALWAYS, *_WITH_BODY),
        parameters=(_ID,),
    ),
    Operation(method="get", path="/v1/models", tag="OpenAI", summary="The names to ask for.", reply=replies.ModelList),
    Operation(
        method="get",
        path="/v1/models/{model}",
        tag="OpenAI",
        summary="One of them.",
        reply=replies.Model,
        statuses=(*_ALWAYS, 404),
        parameters=(("model", "path", "Its name."),),
    ),
    *(
        Operation(
            method="post",
            path=path,
            tag="OpenAI" if path == "/v1/embeddings" else "Pooling",
            summary=pooled.REPLIES[body][1],
            body=body,
            reply=pooled.REPLIES[body][0],
            statuses=(*_ALWAYS, *_WITH_BODY, *_GENERATING),
            parameters=(_ID, _TIMEOUT),
        )
        for path, (body, _) in pooled.POSTS.items()
    ),
    Operation(
        method="post",
        path="/v1/load_lora_adapter",
        tag="OpenAI",
        summary="Read an adapter from the server's disk or the hub, and serve it as a model of its name. For an admin.",
        body=LoadAdapterBody,
        statuses=(*_ALWAYS, 400, 403, 404, 415),
        reply_type="text/plain",
    ),
    Operation(
        method="post",
        path="/v1/unload_lora_adapter",
        tag="OpenAI",
        summary="An adapter's name is gone; requests that run with it finish. For an admin.",
        body=UnloadAdapterBody,
        statuses=(*_ALWAYS, 400, 403, 404, 415),
        reply_type="text/plain",
    ),
    Operation(
        method="post",
        path="/tokenize",
        tag="Tokens",
        summary="Token ids of a text or a conversation.",
        body=protocol.TokenizeBody,
        reply=replies.Tokens,
        statuses=(*_ALWAYS, *_WITH_BODY),
        parameters=(_ID,),
    ),
    Operation(
        method="post",
        path="/detokenize",
        tag="Tokens",
        summary="Text of token ids.",
        body=protocol.DetokenizeBody,
        reply=replies.Text,
        statuses=(*_ALWAYS, *_WITH_BODY),
        parameters=(_ID,),
    ),
    Operation(method="get", path="/v1/files", tag="Batches", summary="Your files.", parameters=_PAGE, statuses=_KEPT),
    Operation(
        method="post",
        path="/v1/files",
        tag="Batches",
        summary="Upload a file of requests as a form with `purpose` (batch) and `file`.",
        statuses=(*_KEPT, 408, 413, 415),
    ),
    Operation(
        method="get", path="/v1/files/{id}", tag="Batches", summary="One of them.", parameters=_FILE, statuses=_KEPT
    ),
    Operation(
        method="delete",
        path="/v1/files/{id}",
        tag="Batches",
        summary="Delete it.",
        parameters=_FILE,
        statuses=(*_KEPT, 409),
    ),
    Operation(
        method="get",
        path="/v1/files/{id}/content",
        tag="Batches",
        summary="What it holds.",
        reply_type="application/octet-stream",
        parameters=_FILE,
        statuses=_KEPT,
    ),
    Operation(
        method="get", path="/v1/batches", tag="Batches", summary="Your batches.", parameters=_PAGE, statuses=_KEPT
    ),
    Operation(
        method="post",
        path="/v1/batches",
        tag="Batches",
        summary="Answer a file's requests beside everything else, with the lowest priority.",
        body=BatchBody,
        reply=Batch,
        statuses=(*_ALWAYS, *_WITH_BODY, 429, 501),
        parameters=(_ID,),
    ),
    Operation(
        method="get",
        path="/v1/batches/{id}",
        tag="Batches",
        summary="How far it is.",
        reply=Batch,
        parameters=_BATCH,
        statuses=_KEPT,
    ),
    Operation(
        method="post",
        path="/v1/batches/{id}/cancel",
        tag="Batches",
        summary="End it; answers that are there stay.",
        reply=Batch,
        parameters=_BATCH,
        statuses=(*_KEPT, 409),
    ),
    Operation(
        method="get",
        path="/health",
        tag="Operation",
        summary="200 while the engine is idle or makes progress, else 503.",
    ),
    Operation(method="get", path="/ping", tag="Operation", summary="As /health, for those who ask there."),
    Operation(method="post", path="/ping", tag="Operation", summary="As /health, for those who ask there."),
    Operation(method="get", path="/version", tag="Operation", summary="Quire's version.", reply=replies.Version),
    Operation(
        method="get",
        path="/load",
        tag="Operation",
        summary="How busy the server is, in one small object; with several models, each under its name too.",
        statuses=(*_ALWAYS, 404),
        parameters=(_MODEL,),
    ),
    Operation(
        method="post",
        path="/sleep",
        tag="Operation",
        summary="Put a model to sleep, or all: its memory is given back until a request wakes it. For an admin.",
        statuses=(*_ALWAYS, 400, 403, 404, 409),
        parameters=(
            _MODEL,
            ("level", "query", "1: the weights go to host memory; 2: the engine's process ends."),
            ("keep_kv", "query", "true: cached prefixes are kept, in host memory."),
        ),
    ),
    Operation(
        method="post",
        path="/wake_up",
        tag="Operation",
        summary="Wake a model, or all, before a request does. For an admin.",
        statuses=(*_ALWAYS, 400, 403, 404),
        parameters=(_MODEL,),
    ),
    Operation(
        method="get",
        path="/is_sleeping",
        tag="Operation",
        summary="Whether a model sleeps, or all do.",
        statuses=(*_ALWAYS, 400, 404),
        parameters=(_MODEL,),
    ),
    Operation(
        method="post",
        path="/v1/models/load",
        tag="Operation",
        summary="Serve one more model. For an admin.",
        body=LoadBody,
        statuses=(*_ALWAYS, 400, 403, 415),
    ),
    Operation(
        method="post",
        path="/v1/models/unload",
        tag="Operation",
        summary="Let a model's requests end, and then its engine. For an admin.",
        body=UnloadBody,
        statuses=(*_ALWAYS, 400, 403, 404, 409, 415),
    ),
    Operation(
        method="get", path="/metrics", tag="Operation", summary="For Prometheus, under vLLM's names.", reply_type=_TEXT
    ),
    Operation(
        method="get",
        path="/live",
        tag="Cache",
        summary="What the page at `/` draws from: one JSON object a line, without end.",
        reply_type="application/x-ndjson",
        statuses=(*_ALWAYS, 400, 404, 429),
        parameters=_WHICH,
    ),
    Operation(
        method="get",
        path="/debug/kv",
        tag="Cache",
        summary="The KV cache in numbers, and where the rest is.",
        statuses=(*_ALWAYS, 400, 404),
        parameters=(("full", "query", "1: the first page of the rest too."), *_WHICH),
    ),
    Operation(
        method="get",
        path="/debug/kv/map",
        tag="Cache",
        summary="Every block: its state, users and hits.",
        statuses=(*_ALWAYS, 400, 404),
        parameters=(("first", "query", "The first block."), _LIMIT, *_WHICH),
    ),
    Operation(
        method="get",
        path="/debug/kv/requests",
        tag="Cache",
        summary="Block tables, and why each request hit or missed.",
        statuses=(*_ALWAYS, 400, 404),
        parameters=(_OFFSET, _LIMIT, *_WHICH),
    ),
    Operation(
        method="get",
        path="/debug/kv/sharing",
        tag="Cache",
        summary="Which blocks which requests share.",
        statuses=(*_ALWAYS, 400, 404),
        parameters=(_LIMIT, *_WHICH),
    ),
    Operation(
        method="get",
        path="/debug/kv/tree",
        tag="Cache",
        summary="Cached prefixes with their hit counts.",
        statuses=(*_ALWAYS, 400, 404),
        parameters=(("node", "query", "Where to begin."), ("depth", "query", "How deep."), _OFFSET, _LIMIT, *_WHICH),
    ),
    Operation(
        method="get",
        path="/debug/kv/blocks/{block}",
        tag="Cache",
        summary="One block: who uses it, and what text it holds.",
        statuses=(*_ALWAYS, 400, 404),
        parameters=(("block", "path", "Its number."), *_WHICH),
    ),
    Operation(
        method="get",
        path="/debug/kv/levels",
        tag="Cache",
        summary="The device and the levels below it: blocks, what moved, what was found there. For an admin.",
        statuses=(*_ALWAYS, 403, 404),
        parameters=_WHICH,
    ),
    Operation(
        method="post",
        path="/debug/kv/levels",
        tag="Cache",
        summary="Warm, pin, unpin or expire a prompt; or expire what was not used for some time. For an admin.",
        body=LevelsBody,
        statuses=(*_ALWAYS, 400, 403, 404, 415),
        parameters=_WHICH,
    ),
    Operation(
        method="get",
        path="/debug/cache",
        tag="Cache",
        summary="Hashes of blocks that the prefix cache gained and lost, for a router. For an admin.",
        statuses=(*_ALWAYS, 400, 403, 404),
        parameters=(("since", "query", "As the last answer had it; without it, everything."),),
    ),
    Operation(
        method="post",
        path="/debug/cache/hashes",
        tag="Cache",
        summary="Hashes of the blocks that a prompt would look for in the prefix cache.",
        body=HashesBody,
        reply=BlockHashes,
        statuses=(*_ALWAYS, *_WITH_BODY, 429, 504),
        parameters=(_ID,),
    ),
    Operation(
        method="get",
        path="/debug/replicas",
        tag="Cache",
        summary="The engines behind this server, and how many the load wants. For an admin.",
        statuses=(*_ALWAYS, 403),
    ),
    Operation(
        method="post",
        path="/debug/replicas",
        tag="Cache",
        summary="Add, drain or remove an engine while serving: no request is lost. For an admin.",
        body=ReplicasBody,
        statuses=(*_ALWAYS, 400, 403, 415),
    ),
)


@lru_cache(maxsize=1)
def openapi_document() -> dict[str, Any]:
    types = [type_ for op in OPERATIONS for type_ in (op.body, op.reply) if type_ is not None]
    _, schemas = msgspec.json.schema_components([*types, replies.Error], ref_template=_REF)
    for type_ in types:
        _say_what_is_refused(type_, schemas)
    paths: dict[str, Any] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _operation(op)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": quire.__version__,
            "summary": "LLM inference on paged KV memory, behind OpenAI's API.",
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Where the operator set API keys."}
            },
            "responses": {
                str(status): {"description": meaning, "content": {"application/json": {"schema": _ref("Error")}}}
                for status, meaning in _ERRORS.items()
            },
        },
    }


def _operation(op: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {op.reply_type: {"schema": _ref(op.reply.__name__) if op.reply is not None else {}}}
    if op.generates:
        content[_STREAM] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "tags": [op.tag],
        "summary": op.summary,
        "operationId": op.method + op.path.replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {
            "200": {"description": "As asked for.", "content": content},
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(op.statuses)},
        },
    }
    if op.parameters:
        described["parameters"] = [
            {
                "name": name,
                "in": where,
                "required": where == "path",
                "description": meaning,
                "schema": {"type": "integer", "minimum": 0} if name in _NUMBERS else {"type": "string"},
            }
            for name, where, meaning in op.parameters
        ]
    if op.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(op.body.__name__)}},
        }
    return described


def _say_what_is_refused(type_: type[msgspec.Struct], schemas: dict[str, Any]) -> None:
    for name in protocol.refused_fields(type_):
        refusal = FIELDS[name]
        schemas[type_.__name__]["properties"][name] = {
            "enum": list(refusal.taken),
            "default": None,
            "description": f"Not supported: {refusal.why}.",
        }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}
