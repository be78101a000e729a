from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_harness import ScriptedEngine, Server, running

from quire.server.settings import ApiKey

CURL = "curl"


def curl(server: Server, path: str, *arguments: str) -> str:
    done = subprocess.run(
        [CURL, "--silent", "--show-error", "--no-buffer", f"{server.url}{path}", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout


def test_curl(server: Server) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 4})
    answer = json.loads(curl(server, "/v1/completions", "--json", body))
    streamed = curl(
        server, "/v1/completions", "-H", "Content-Type: application/json", "-d", body[:-1] + ', "stream": true}'
    )
    *chunks, done, _ = streamed.split("\n\n")
    assert done == "data: [DONE]"
    text = "".join(json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks)
    assert text == answer["choices"][0]["text"] == "Grü"


def test_curl_without_a_content_type_is_told_so(server: Server) -> None:
    assert (
        json.loads(curl(server, "/v1/completions", "-d", '{"prompt":"x"}'))["error"]["type"] == "invalid_request_error"
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_paths_and_methods(server: Server, method: str, path: str, status: int) -> None:
    reply = server.request(method, path)
    assert reply.status == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert status != 405 or reply.headers["allow"]


def test_a_bug_is_a_500_without_details(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret at /home/me")

    monkeypatch.setattr(server.engine, "prepare", broken)
    monkeypatch.setattr(server.engine, "load", broken)
    for reply in (server.post("/v1/completions", {"prompt": "x"}), server.get("/load")):
        assert (reply.status, reply.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in reply.text


def test_guards_are_in_front(tiny_model: Path) -> None:
    keys = (ApiKey("me", "right"),)
    engine = ScriptedEngine(tiny_model)
    with running(engine, api_keys=keys, max_body_bytes=500) as server:
        body = {"prompt": "x", "max_tokens": 1}
        assert server.post("/v1/completions", body).status == 401
        assert server.get("/openapi.json").status == 401
        assert server.get("/health").status == 200
        assert server.post("/v1/completions", body, authorization="Bearer right").status == 200
        assert engine.prepared[-1].request.tenant == "me"
        large = server.post("/v1/completions", {"prompt": "x" * 1000}, authorization="Bearer right")
        assert (large.status, large.json()["error"]["code"]) == (413, "body_too_large")


def test_while_it_starts_it_says_so(tiny_model: Path) -> None:
    from quire.server.life import LifeState

    with running(ScriptedEngine(tiny_model)) as server:
        server.context.life.state = LifeState.STARTING
        reply = server.post("/v1/completions", {"prompt": "x"})
        assert (reply.status, reply.json()["error"]["code"]) == (503, "starting")
        assert server.get("/health").status == 503


def test_the_servers_process_needs_no_torch() -> None:
    code = (
        "import sys, quire.server.run, quire.engine.client; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
