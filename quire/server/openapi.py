"""The API's description: the OpenAPI 3.1 document, and `/docs`, which shows it as one page of HTML.

The document is made from the table of paths and the very types that decode and encode the bodies, so that it cannot
drift. The page fetches nothing and runs no script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
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


# -- the page

_STYLE = (Path(__file__).parent / "docs.css").read_text(encoding="utf-8")
_WORD = 2**31 - 1
_EXAMPLES: dict[str, Any] = {
    "/v1/completions": {"prompt": "A quire is", "max_tokens": 32},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is a quire?"}], "stream": True},
    "/tokenize": {"prompt": "A quire is"},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def docs_page(document: Mapping[str, Any]) -> str:
    info, schemas = document["info"], document["components"]["schemas"]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(_operation_html(path, method, operation, schemas))
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(parts)}" for tag, parts in by_tag.items())
    named = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_fields(schema)}</details>'
        for name, schema in sorted(schemas.items())
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(info["title"])} API</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(info['title'])} <span class=soft>{escape(info['version'])}</span></h1>"
        f"<p>{escape(info['summary'])} The same as JSON: <a href='openapi.json'>openapi.json</a>.</p>"
        f"{sections}<h2>Types</h2>{named}<h2>Errors</h2>{_errors(document)}</body></html>"
    )


def _operation_html(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    parts = [
        f'<details><summary><span class="{method}">{method.upper()}</span><code>{escape(path)}</code>'
        f"<span class=soft>{_prose(operation['summary'])}</span></summary>"
    ]
    if path in _EXAMPLES:
        body = json.dumps(_EXAMPLES[path])
        parts.append(
            f"<h3>Example</h3><pre>curl http://127.0.0.1:8000{escape(path)} \\\n"
            f"  -H 'content-type: application/json' \\\n  -d '{escape(body, quote=False)}'</pre>"
        )
    if operation.get("parameters"):
        rows = [(p["name"], p["in"], p["description"]) for p in operation["parameters"]]
        parts.append("<h3>Headers and path</h3>" + _table(("name", "where", ""), rows))
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        parts.append("<h3>Body</h3>" + _fields(schemas[_name(schema)]))
    answers = operation["responses"]["200"]["content"]
    said = ", ".join(
        f"<code>{escape(kind)}</code>" + (f": {_type(answer['schema'])}" if answer["schema"] else "")
        for kind, answer in answers.items()
    )
    errors = ", ".join(status for status in operation["responses"] if status != "200")
    parts.append(f"<h3>Answer</h3><p>{said}</p><p class=soft>Errors: {errors}.</p></details>")
    return "".join(parts)


def _fields(schema: Mapping[str, Any]) -> str:
    """Fields as a table, those that are not supported in a line below it."""
    required = set(schema.get("required", ()))
    rows, refused = [], []
    fields = schema.get("properties", {})
    for name, field in sorted(fields.items(), key=lambda item: item[0] not in required):  # the sort keeps their order
        if str(field.get("description", "")).startswith("Not supported"):
            refused.append(f"<code>{escape(name)}</code>")
            continue
        shown = f"<b>{escape(name)}</b>" if name in required else escape(name)
        kind = _type(field) if name in required else _type(field).removesuffix(" or null")
        rows.append((f"<code>{shown}</code>", kind, _prose(field.get("description", ""))))
    table = _table(("field", "type", ""), rows, is_html=True) if rows else ""
    if rows and required and len(required) < len(fields):
        table += "<p class=soft>What is not <b>bold</b> may be left out or null.</p>"
    note = f"<p class=soft>Refused unless empty: {', '.join(refused)}.</p>" if refused else ""
    return table + note


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(_name(schema))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and "additionalProperties" in schema:
        return f"map to {_type(schema['additionalProperties'] or {})}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    # Limits that only keep a number in its machine word are no news.
    low_said = low is not None and low > -_WORD
    high_said = high is not None and high < _WORD
    if low_said and high_said:
        return f"{escape(kind)}, {'over ' if 'exclusiveMinimum' in schema else ''}{low:g} to {high:g}"
    if low_said:
        return f"{escape(kind)}, {low:g} or more"
    return escape(kind) + (f", up to {high:g}" if high_said else "")


def _errors(document: Mapping[str, Any]) -> str:
    rows = [(status, answer["description"]) for status, answer in document["components"]["responses"].items()]
    shape = '<pre>{"error": {"message": "...", "type": "...", "param": "..." or null, "code": "..." or null}}</pre>'
    return shape + _table(("status", ""), rows)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, is_html: bool = False) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell if is_html else _prose(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _prose(text: str) -> str:
    """Escaped, with `code` in backquotes."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[1]
