"""The guards in their order, around an application that only answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from quire.server import guards
from quire.server.auth import make_key
from quire.server.life import ServerLife
from quire.server.settings import ServerSettings

KEY = make_key("sk-1", name="one", source="test")
AUTHORIZED = {"authorization": "Bearer sk-1"}


def client(**settings: Any) -> TestClient:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"bytes": len(await request.body()), "tenant": request.state.tenant})

    life = ServerLife()
    life.ready()
    first = SimpleNamespace(metrics=SimpleNamespace(on_refused=lambda reason: None))
    context: Any = SimpleNamespace(
        settings=ServerSettings(**settings), life=life, first=first, refused=lambda error, client: None
    )
    routes = [Route("/v1/completions", answer, methods=["POST"]), Route("/v1/models", answer)]
    return TestClient(Starlette(routes=routes, middleware=guards.middleware(context)), base_url="http://localhost")


def test_the_key_is_checked_before_the_body_is_read() -> None:
    guarded = client(api_keys=(KEY,), max_body_bytes=10)
    assert guarded.post("/v1/completions", content=b"x" * 100).status_code == 401
    assert guarded.post("/v1/completions", content=b"x" * 100, headers=AUTHORIZED).status_code == 413
    answer = guarded.post("/v1/completions", content=b"x" * 10, headers=AUTHORIZED)
    assert answer.json() == {"bytes": 10, "tenant": "one"}


def test_no_other_sites_page_may_call_unless_named() -> None:
    origin = {"origin": "https://example.org"}
    assert "access-control-allow-origin" not in client().get("/v1/models", headers=origin).headers
    preflight = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert client().options("/v1/completions", headers=preflight).status_code == 405

    allowed = client(cors_origins=("https://example.org",), api_keys=(KEY,))
    asked = allowed.options("/v1/completions", headers=preflight)  # a browser sends it without the key
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://example.org"
    refused = allowed.get("/v1/models", headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.org"
    other = allowed.get("/v1/models", headers=AUTHORIZED | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
