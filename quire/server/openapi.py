"""The OpenAPI 3.1 document: made from the table of paths and the very types that decode and encode the bodies, so that
it cannot drift."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

import quire
from quire.refusals import FIELDS
from quire.server import protocol, replies
from quire.server.paths import OPERATIONS, Operation

_REF = "#/components/schemas/{name}"
_NUMBERS = {"limit", "offset", "first", "depth", "full", "block"}  # parameters
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


@lru_cache(maxsize=1)
def openapi_document() -> dict[str, Any]:
    operations = [(tag, op) for tag, ops in OPERATIONS.items() for op in ops]
    types = [type_ for _, op in operations for type_ in (op.body, op.reply) if type_ is not None]
    _, schemas = msgspec.json.schema_components([*types, replies.Error], ref_template=_REF)
    for type_ in types:
        _say_what_is_refused(type_, schemas)
    paths: dict[str, Any] = {}
    for tag, op in operations:
        path = op.path.replace(":path", "")
        name = op.method + path.replace("/", "_").replace("{", "").replace("}", "")
        paths.setdefault(path, {})[op.method] = {"tags": [tag], "operationId": name, **_operation(op)}
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
        content["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = {*_ALWAYS, *op.errors, *((403,) if op.for_admin or op.changes else ())}
    described: dict[str, Any] = {
        "summary": op.summary,
        "responses": {
            "200": {"description": "As asked for.", "content": content},
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)},
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
        schema = {"application/json": {"schema": _ref(op.body.__name__)}}
        described["requestBody"] = {"required": True, "content": schema}
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
