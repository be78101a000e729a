from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path
from typing import Any

import pytest
from live_harness import eventually
from server_harness import ScriptedEngine, running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from quire.errors import ConfigError
from quire.server import logs
from quire.server.auth import Auth, is_open, make_key, read_key_file

PATHS = ("/", "/health", "/static/app.js", "/v1/models", "/metrics", "/docs", "/openapi.json", "/live", "/debug/kv")


async def tenant(request: Request) -> PlainTextResponse:
    return PlainTextResponse(request.scope["state"]["tenant"])


def client(*keys: Any) -> TestClient:
    app = Starlette(routes=[Route(path, tenant, methods=["GET", "POST"]) for path in PATHS])
    return TestClient(Auth(app, keys))


ALICE = make_key("sk-alice", name="alice", source="test")
BOB = make_key("sk-bob", source="test")


def test_without_keys_everything_is_open() -> None:
    assert all(client().get(path).status_code == 200 for path in PATHS)
    assert client().get("/v1/models").text == ""


def test_with_keys_everything_is_guarded_but_health_and_the_pages_files() -> None:
    answers = {path: client(ALICE).get(path) for path in PATHS}
    assert {path for path, answer in answers.items() if answer.status_code == 200} == {"/", "/health", "/static/app.js"}
    refused = answers["/v1/models"]
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert client(ALICE).post("/health").status_code == 401
    assert client(ALICE).get("/nowhere").status_code == 401  # not even what exists is told


@pytest.mark.parametrize("path", ["//health", "/health/", "/static", "/staticx", "/HEALTH", "/health/../v1/models", ""])
def test_odd_paths_open_nothing(path: str) -> None:
    assert is_open("/static/app.js", "HEAD")
    assert not is_open("/static/app.js", "POST")
    assert not is_open(path, "GET")


def test_each_key_has_its_tenant_and_no_key_shows() -> None:
    both = client(ALICE, BOB)
    assert both.get("/v1/models", headers={"authorization": "Bearer sk-alice"}).text == "alice"
    name = both.get("/v1/models", headers={"authorization": "bearer  sk-bob"}).text
    assert name == BOB.tenant
    assert name.startswith("key-")
    assert "bob" not in name
    assert "sk-" not in repr(ALICE)
    assert make_key("sk-bob", source="again").tenant == BOB.tenant


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Basic sk-alice", "sk-alice", "Bearer sk-alic", "Bearer sk-alice2"]
)
def test_what_is_no_known_key_is_refused(value: str) -> None:
    assert client(ALICE).get("/v1/models", headers={"authorization": value}).status_code == 401


def test_two_authorization_headers_are_refused() -> None:
    headers = [("authorization", "Bearer sk-alice"), ("authorization", "Bearer wrong")]
    assert client(ALICE).get("/v1/models", headers=headers).status_code == 401


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr(hmac, "compare_digest", compare)
    auth = Auth(Starlette(), [ALICE, BOB])
    for key in (b"sk-alice", b"sk-bob", b"neither"):
        compared.clear()
        auth.key_of(key)
        assert compared == [hashlib.sha256(k.key.encode()).digest() for k in (ALICE, BOB)]


def test_a_key_file_has_keys_names_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nalice:sk-1\n  sk-2  \nbob:sk:with:colons\nops:sk-3  admin\nsk-4 admin\n")
    keys = read_key_file(str(path))
    assert [(k.tenant, k.key, k.is_admin) for k in keys] == [
        ("alice", "sk-1", False),
        (make_key("sk-2", source="").tenant, "sk-2", False),
        ("bob", "sk:with:colons", False),
        ("ops", "sk-3", True),
        (make_key("sk-4", source="").tenant, "sk-4", True),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# nothing\n", "holds no key"),
        ("ok\nwith space\n", "line 2"),
        ("ok with space admin\n", "line 1"),
        ("secret administrator\n", "line 1"),
        ("schlüssel\n", "line 1"),
        ("ok\nsecret:\n", "keys, line 2: must be KEY or NAME:KEY"),
        (":secret\n", "keys, line 1: must be KEY or NAME:KEY"),
        ("team/a:secret\n", "keys, line 1: must be KEY or NAME:KEY"),
        (f"{'n' * 65}:secret\n", "keys, line 1: must be KEY or NAME:KEY"),
    ],
)
def test_a_bad_key_file_is_refused_without_showing_a_key(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as refused:
        read_key_file(str(path))
    assert "with space" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_an_unreadable_key_file_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="api_key_file") as refused:
            read_key_file(str(path))
        assert "\n" not in str(refused.value)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_key_file(str(tmp_path / "bytes"))


def test_a_refused_key_is_counted_and_logged_but_not_at_the_attackers_rate(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "OFTEN_S", 0.2)
    with caplog.at_level(logging.WARNING), running(ScriptedEngine(tiny_model), api_keys=(ALICE,)) as server:
        for _ in range(20):
            assert server.request("GET", "/v1/models", authorization="Bearer sk-guess").status == 401
        page = server.request("GET", "/metrics", authorization="Bearer sk-alice").text
        assert 'reason="invalid_api_key"} 20.0' in page

        def told() -> list[dict[str, Any]]:
            return [
                record.quire_event[1]
                for record in caplog.records
                if getattr(record, "quire_event", ("",))[0] == "refused"
            ]

        eventually(lambda: sum(fields["times"] for fields in told()) == 20)
    assert len(told()) < 20
    assert all(fields["reason"] == "invalid_api_key" and fields["client"] == "127.0.0.1" for fields in told())
    assert "sk-guess" not in caplog.text
