"""The guards: each alone, and all of them in their order, around applications that only answer."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observing_fakes import eventually
from server_harness import ScriptedEngine, running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import ConfigError
from quire.server import guards, logs
from quire.server.errors import ApiError
from quire.server.guards import Auth, BodyLimits, Gate, _name, allowed_hosts, is_open
from quire.server.life import ServerLife
from quire.server.settings import ServerSettings, make_key, read_key_file

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
    return client_of(guards.guarded(Starlette(routes=routes), context))


def client_of(app: ASGIApp) -> TestClient:
    """TestClient looks whether an application is a coroutine function, which guards are not."""

    async def awaiting(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    return TestClient(awaiting, base_url="http://localhost")


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


PATHS = ("/", "/health", "/static/app.js", "/v1/models", "/metrics", "/docs", "/openapi.json", "/live", "/debug/kv")


async def tenant(request: Request) -> PlainTextResponse:
    return PlainTextResponse(request.scope["state"]["tenant"])


def with_keys(*keys: Any) -> TestClient:
    app = Starlette(routes=[Route(path, tenant, methods=["GET", "POST"]) for path in PATHS])
    return client_of(Auth(app, keys))


ALICE = make_key("sk-alice", name="alice", source="test")
BOB = make_key("sk-bob", source="test")


def test_without_keys_everything_is_open() -> None:
    assert all(with_keys().get(path).status_code == 200 for path in PATHS)
    assert with_keys().get("/v1/models").text == ""


def test_with_keys_everything_is_guarded_but_health_and_the_pages_files() -> None:
    answers = {path: with_keys(ALICE).get(path) for path in PATHS}
    assert {path for path, answer in answers.items() if answer.status_code == 200} == {"/", "/health", "/static/app.js"}
    refused = answers["/v1/models"]
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert with_keys(ALICE).post("/health").status_code == 401
    assert with_keys(ALICE).get("/nowhere").status_code == 401  # not even what exists is told


@pytest.mark.parametrize("path", ["//health", "/health/", "/static", "/staticx", "/HEALTH", "/health/../v1/models", ""])
def test_odd_paths_open_nothing(path: str) -> None:
    assert is_open("/static/app.js", "HEAD")
    assert not is_open("/static/app.js", "POST")
    assert not is_open(path, "GET")


def test_each_key_has_its_tenant_and_no_key_shows() -> None:
    both = with_keys(ALICE, BOB)
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
    assert with_keys(ALICE).get("/v1/models", headers={"authorization": value}).status_code == 401


def test_two_authorization_headers_are_refused() -> None:
    headers = [("authorization", "Bearer sk-alice"), ("authorization", "Bearer wrong")]
    assert with_keys(ALICE).get("/v1/models", headers=headers).status_code == 401


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


@pytest.mark.parametrize(
    ("settings", "taken", "refused"),
    [
        ({}, ["localhost", "127.0.0.1", "[::1]"], ["evil.example", "localhost.evil.example", ""]),
        ({"host": "127.0.0.2"}, ["127.0.0.2", "localhost"], ["127.0.0.3"]),
        ({"host": "::1"}, ["[::1]"], ["::1"]),
        ({"allowed_hosts": ("My.Box",)}, ["my.box", "localhost"], ["my.box.evil.example"]),
        ({"host": "0.0.0.0", "allowed_hosts": ("my.box",)}, ["my.box"], ["localhost"]),
    ],
)
def test_names(settings: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    names = allowed_hosts(ServerSettings(**settings))
    assert names is not None
    assert not set(taken) - names
    assert not set(refused) & names


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"allowed_hosts": ("*",)}, {"uds": "/tmp/x"}])
def test_where_any_name_may_be_right(settings: dict[str, Any]) -> None:
    assert allowed_hosts(ServerSettings(**settings)) is None


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b"localhost", "localhost"),
        (b"LocalHost.:8000", "localhost"),
        (b"[::1]:8000", "[::1]"),
        (b"[::1]", "[::1]"),
        (b"127.0.0.1:80", "127.0.0.1"),
        (b"", ""),
        (b"evil\xff:1", "evil\xff"),
    ],
)
def test_a_header_is_read_without_its_port(header: bytes, name: str) -> None:
    assert _name(header) == name


@pytest.mark.parametrize("name", ["http://a", "a:80", "a b", "", "a/b"])
def test_what_is_no_name_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts must be names"):
        ServerSettings(allowed_hosts=(name,))


def test_a_page_that_made_its_name_ours_reads_nothing(tiny_model: Path) -> None:
    with running(ScriptedEngine(tiny_model), cors_origins=("*",)) as server:
        for path in ("/", "/health", "/debug/kv", "/v1/models", "/nowhere"):
            reply = server.request("GET", path, host=f"evil.example:{server.port}", origin="http://evil.example")
            assert reply.status == 403
            assert reply.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-hosts evil.example" in reply.json()["error"]["message"]
            assert "access-control-allow-origin" not in reply.headers
        assert server.request("GET", "/v1/models", host=f"localhost:{server.port}").status == 200
        reply = server.request("GET", "/metrics")
        assert 'reason="host_not_allowed"} 5.0' in reply.text


class Bench:
    def __init__(self) -> None:
        self.life = ServerLife()
        self.refused: list[str] = []

        async def answer(request: Request) -> JSONResponse:
            return JSONResponse(self.life.num_in_flight)

        paths = ("/", "/health", "/metrics", "/v1/completions")
        app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in paths])
        self.client = client_of(Gate(app, self.life, self.refused.append))


def test_a_serving_server_counts_the_work_under_way() -> None:
    bench = Bench()
    bench.life.ready()
    assert bench.client.post("/v1/completions").json() == 1
    assert bench.client.get("/metrics").json() == 0
    assert bench.life.num_in_flight == 0


@pytest.mark.parametrize("state", ["starting", "dead"])
def test_starting_and_dead_serve_health_and_the_page_alone(state: str) -> None:
    bench = Bench()
    if state == "dead":
        bench.life.died("reason")
    assert bench.client.get("/health").status_code == 200
    assert bench.client.get("/").status_code == 200
    for answer in (bench.client.get("/metrics"), bench.client.post("/v1/completions")):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == state
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["connection"] == "close"
    assert bench.refused == [state, state]


def test_draining_serves_gets_and_takes_no_work() -> None:
    bench = Bench()
    bench.life.ready()
    bench.life.begin_drain()
    assert bench.client.get("/metrics").status_code == 200
    assert bench.client.post("/v1/completions").json()["error"]["code"] == "draining"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body's length; errors as the real endpoints tell them."""
    length = 0
    try:
        while True:
            message = await receive()
            length += len(message.get("body", b""))
            if not message.get("more_body"):
                break
    except ApiError as error:
        await error.respond(send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % length})


async def careless(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass


class Exchange:
    """One request through the middleware: pieces in, and what came out."""

    def __init__(self, pieces: Iterable[bytes | float], *, length: bytes | None = None, app: Any = echo) -> None:
        self.pieces = list(pieces)
        self.sent: list[Message] = []
        self.num_read = 0
        headers = [(b"content-length", length)] if length is not None else []
        self.scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.app = BodyLimits(app, max_body_bytes=10, timeout_s=0.1)

    async def receive(self) -> Message:
        if self.num_read == len(self.pieces):
            return {"type": "http.disconnect"}
        piece = self.pieces[self.num_read]
        if isinstance(piece, float):
            await asyncio.sleep(piece)
            piece = b"."
        self.num_read += 1
        return {"type": "http.request", "body": piece, "more_body": self.num_read < len(self.pieces)}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def run(self) -> int:
        asyncio.run(self.app(self.scope, self.receive, self.send))
        ends = [m for m in self.sent if m["type"] == "http.response.body" and not m.get("more_body")]
        assert len(ends) == 1
        assert self.sent[-1] is ends[0]
        return int(self.sent[0]["status"])


def test_a_body_within_the_limit_passes() -> None:
    for length in (b"10", None):
        exchange = Exchange([b"01234", b"56789"], length=length)
        assert exchange.run() == 200
        assert exchange.sent[-1]["body"] == b"10"


@pytest.mark.parametrize("app", [echo, careless])
def test_an_announced_body_over_the_limit_is_refused_unread_by_the_application(app: Any) -> None:
    exchange = Exchange([b"0" * 11], length=b"11", app=app)
    assert exchange.run() == 413
    assert b"10 bytes" in exchange.sent[1]["body"]
    assert (b"connection", b"close") in exchange.sent[0]["headers"]


@pytest.mark.parametrize("app", [echo, careless])
@pytest.mark.parametrize("length", [None, b"7", b"junk"])
def test_a_body_without_an_honest_length_is_stopped_while_it_arrives(app: Any, length: bytes | None) -> None:
    exchange = Exchange([b"012345"] * 50, length=length, app=app)
    assert exchange.run() == 413
    # The rest was read and thrown away, so that the client reads the answer instead of a reset.
    assert exchange.num_read == 50


def test_what_is_thrown_away_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_LINGER_BYTES", 30)
    exchange = Exchange([b"012345"] * 50)
    assert exchange.run() == 413
    assert exchange.num_read < 10
    monkeypatch.setattr(guards, "_LINGER_S", 0.05)
    exchange = Exchange([b"0" * 11, 60.0, b"."])
    assert exchange.run() == 413


@pytest.mark.parametrize("app", [echo, careless])
def test_a_body_that_trickles_in_is_a_408(app: Any) -> None:
    exchange = Exchange([0.03] * 8, app=app)  # no gap is long, the whole is
    assert exchange.run() == 408


def test_a_hang_up_after_the_body_is_passed_on_without_a_deadline() -> None:
    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        await asyncio.sleep(0.15)
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert Exchange([b"x"], app=waits).run() == 200


def test_errors_of_the_application_pass() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(418, "teapot")

    with pytest.raises(ApiError, match="teapot"):
        Exchange([b"x"], app=broken).run()
