"""The document, and what it promises: whatever is sent, the answer is one of those that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_strategies import mutated, of_schema
from server_harness import Reply, ScriptedEngine, Server, make_context, running
from starlette.routing import Route

from quire.refusals import FIELDS
from quire.server.app import routes
from quire.server.openapi import docs_page, openapi_document
from quire.server.paths import OPERATIONS
from quire.server.protocol import ChatBody, refused_fields

DOCUMENT = openapi_document()
SCHEMAS = DOCUMENT["components"]["schemas"]
POOLED = {"/v1/embeddings", *(op.path for op in OPERATIONS["Pooling"])}
ALIASES = {path for path in POOLED if not path.startswith("/v1/")}
BODIES = {
    path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    for path, methods in DOCUMENT["paths"].items()
    if "requestBody" in methods.get("post", {}) and path not in ALIASES
}
FUZZ = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def fuzzed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    kept = str(tmp_path_factory.mktemp("kept"))
    with running(ScriptedEngine(tiny_model, max_model_len=48), batch_dir=kept) as server:
        yield server


def routes_of_the_app(tiny_model: Path) -> set[tuple[str, str]]:
    return {
        (route.path.replace(":path", ""), method.lower())
        for route in routes(make_context(ScriptedEngine(tiny_model)))
        if isinstance(route, Route) and route.include_in_schema
        for method in (route.methods or ())
        if method != "HEAD"
    }


def test_every_route_is_in_the_document(tiny_model: Path) -> None:
    import asyncio

    async def made() -> set[tuple[str, str]]:
        return routes_of_the_app(tiny_model)

    described = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert asyncio.run(made()) - {("/openapi.json", "get"), ("/docs", "get")} == described


def test_the_document_hangs_together(server: Server) -> None:
    reply = server.get("/openapi.json")
    assert reply.json() == json.loads(json.dumps(DOCUMENT))
    assert DOCUMENT["openapi"] == "3.1.0"

    def check(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                target: Any = DOCUMENT
                for key in node["$ref"].removeprefix("#/").split("/"):
                    target = target[key]
            for value in node.values():
                check(value)
        elif isinstance(node, list):
            for value in node:
                check(value)

    check(DOCUMENT)
    names = [op["operationId"] for methods in DOCUMENT["paths"].values() for op in methods.values()]
    assert len(set(names)) == len(names)


def test_it_says_what_is_refused() -> None:
    for name in refused_fields(ChatBody):
        described = SCHEMAS["ChatBody"]["properties"][name]
        assert described["enum"] == list(FIELDS[name].taken)
        assert described["description"].startswith("Not supported")
    assert SCHEMAS["ChatBody"]["additionalProperties"] is False


def test_numbers_in_a_query_are_integers() -> None:
    found = {
        parameter["name"]: parameter["schema"]["type"]
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for parameter in operation.get("parameters", ())
    }
    integers = {name for name, kind in found.items() if kind == "integer"}
    assert integers == {"limit", "offset", "first", "depth", "full", "block"}


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    required = SCHEMAS[BODIES[path]].get("required", [])
    return of_schema(SCHEMAS[BODIES[path]], SCHEMAS).map(lambda body: _small(body, required))


def _small(body: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Few choices: the engine here is slow, and their number is not the point. And often few fields: among many there
    is nearly always one that is rightly refused."""
    if len(body) % 2:
        kept = {*required, *sorted(body)[len(body) // 2 :][:2]}
        body = {name: value for name, value in body.items() if name in kept}
        for message in body.get("messages") or ():
            message["content"] = message.get("content") or "text"
            message.pop("tool_calls", None)
    if isinstance(body.get("n"), int):
        body["n"] = min(body["n"], 3)
    body.pop("timeout", None)  # a tiny one is rightly a 504
    if len(body) % 3:  # random grammars are nearly always refused, and rightly
        for name in ("response_format", *[name for name in body if name.startswith(("structured", "guided"))]):
            body.pop(name, None)
    return body


def check(server: Server, path: str, body: bytes) -> Reply:
    reply = server.request("POST", path, body, content_type="application/json")
    assert reply.status < 500, (body, reply.text)
    assert str(reply.status) in DOCUMENT["paths"][path]["post"]["responses"], (body, reply.text)
    if reply.status != 200:
        error = reply.json()["error"]
        assert set(error) == ({"message", "type"} if "messages" in path else {"message", "type", "param", "code"})
        assert error["message"]
        assert error["type"] == ("not_found_error" if reply.status == 404 else "invalid_request_error")
    elif reply.headers["content-type"].startswith("text/event-stream"):
        if path.startswith(("/v1/messages", "/v1/responses")):
            assert not re.search(r"^event: (error|response.failed)", reply.text, re.M), (body, reply.text)
        else:
            assert not any("error" in event for event in reply.events()), (body, reply.text)
    elif described := _reply_of(path):
        assert set(reply.json()) >= set(SCHEMAS[described]["required"])
    return reply


def _reply_of(path: str) -> str:
    answer = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
    return str(answer["schema"].get("$ref", "").rsplit("/", 1)[-1])


# A batch must name a file that is there, an adapter a folder, and this server's engine is neither replicas nor one that
# can be unloaded, and its model generates.
REFUSED_HERE = {"/v1/batches", "/debug/replicas", "/debug/kv/levels", "/v1/models/load", "/v1/models/unload", *POOLED}
REFUSED_HERE |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


@pytest.mark.parametrize("path", sorted(BODIES.keys() - REFUSED_HERE))
def test_allowed_bodies(fuzzed: Server, path: str) -> None:
    statuses: list[int] = []

    @FUZZ
    @given(bodies(path))
    def run(body: dict[str, Any]) -> None:
        body["model"] = "tiny"
        statuses.append(check(fuzzed, path, json.dumps(body).encode()).status)

    run()
    assert 200 in statuses, "every one was refused: the test tests nothing"


@pytest.mark.parametrize("path", BODIES)
def test_other_bodies(fuzzed: Server, path: str) -> None:
    statuses: list[int] = []
    names = sorted(SCHEMAS[BODIES[path]]["properties"])

    @FUZZ
    @given(mutated(bodies(path), names))
    def run(body: bytes) -> None:
        statuses.append(check(fuzzed, path, body).status)

    run()
    assert 400 in statuses


@pytest.mark.parametrize("path", ["/v1/models/{}", "/debug/kv/blocks/{}", "/static/{}", "/{}"])
def test_other_paths(fuzzed: Server, path: str) -> None:
    for name in ("%00", "..%2f..%2fetc%2fpasswd", "%ff", "a" * 2000, "%F0%9F%92%A9"):
        reply = fuzzed.get(path.format(name))
        assert 400 <= reply.status < 500, reply.text
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


VOID = {"meta", "link", "br"}


class Checker(HTMLParser):
    """Counts that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        if tag == "a":
            self.links.add(str(values["href"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_it_shows_every_path_and_field(server: Server) -> None:
    reply = server.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    page = read(reply.text)
    document = openapi_document()
    assert all(path in page.text for path in document["paths"])
    assert all(name in page.text for name in document["components"]["schemas"]["ChatBody"]["properties"])
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= page.ids


def test_it_fetches_nothing_and_runs_nothing(server: Server) -> None:
    reply = server.get("/docs")
    assert "<script" not in reply.text
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.findall(r'(?:src|href)="https?:', reply.text)
    assert "prefers-color-scheme: dark" in reply.text


def test_what_a_document_says_is_text() -> None:
    document = openapi_document() | {"info": {"title": "<b>", "version": "1", "summary": "<script>x</script>"}}
    assert "<script" not in docs_page(document)
