"""`quire router` in front of real servers with simulated engines, and of servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import Reply, Server, running
from sim_engine import SimSettings, sim_options

from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.errors import ConfigError
from quire.router.servers import Servers
from quire.server.http_server import HttpServer
from quire.server.listen import open_socket
from quire.server.proxy import create_proxy_app, run_proxy
from quire.server.settings import ServerSettings


class Front:
    """A router that runs in a thread of its own."""

    def __init__(self, port: int, servers: Servers) -> None:
        self.port = port
        self.servers = servers

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json", **headers})
            response = connection.getresponse()
            lines = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, lines, response.read().decode())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.request("POST", path, body, **headers)

    def metric(self, name: str) -> float:
        page = self.request("GET", "/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in page if line.startswith(f"quire:router_{name}"))

    def until(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until_s
            time.sleep(0.02)


@contextlib.contextmanager
def routing(*urls: str, **options: Any) -> Iterator[Front]:
    settings = ServerSettings(port=0)
    listener = open_socket(settings)
    started = threading.Event()
    made: list[Any] = []

    async def serve() -> None:
        servers, stop = Servers(urls, **options), asyncio.Event()
        made.extend((asyncio.get_running_loop(), servers, stop))
        started.set()
        await run_proxy(servers, listener, HttpServer(create_proxy_app(servers, settings), settings, None), stop)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(60)
    loop, servers, stop = made
    try:
        yield Front(listener.getsockname()[1], servers)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


def sim_server(model: Path, name: str = "tiny", **settings: Any) -> contextlib.AbstractContextManager[Server]:
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu", block_size=4)
    return running(EngineClient(config, sim_options(SimSettings(step_s=0.005))), served_model_names=(name,), **settings)


@contextlib.contextmanager
def misbehaving(answer: bytes) -> Iterator[str]:
    """Answers the questions of a router, and every POST with these bytes and a closed connection."""
    models = json.dumps({"data": [{"id": "tiny"}]}).encode()

    def page(status: bytes, body: bytes) -> bytes:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        return head % (status, len(body)) + body

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    asked = connection.recv(65536)
                    if asked.startswith(b"GET /v1/models"):
                        connection.sendall(page(b"200 OK", models))
                    elif asked.startswith(b"GET /health"):
                        connection.sendall(page(b"200 OK", b"{}"))
                    elif asked.startswith(b"GET"):
                        connection.sendall(page(b"404 Not Found", b"{}"))
                    elif answer:
                        connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


PROMPT = "a long prompt that both of them could answer, and only one has cached by now. " * 2


def body_of(prompt: str = PROMPT, **changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **changes}


def test_answers_are_those_of_the_servers_and_prompts_return_to_their_cache(tiny_model: Path) -> None:
    with sim_server(tiny_model) as a, sim_server(tiny_model) as b, routing(a.url, b.url) as front:
        front.until(lambda: front.servers.num_up == 2)
        assert all(one.is_exact for one in front.servers.all.values()) and front.servers.router.block_size == 4
        expected = a.post("/v1/completions", body_of("another")).json()["choices"][0]["text"]
        assert front.post("/v1/completions", body_of("another")).json()["choices"][0]["text"] == expected
        events = front.post("/v1/completions", body_of("another", stream=True)).events()
        assert "".join(event["choices"][0]["text"] for event in events) == expected
        first = front.post("/v1/completions", body_of()).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        # What the servers publish is what routes: no ticket is open any more.
        front.until(lambda: front.metric("server_cached_blocks") >= len(PROMPT) // 4)
        for _ in range(4):
            again = front.post("/v1/completions", body_of()).json()
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(PROMPT) - 1) // 4 * 4
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        assert front.post("/v1/chat/completions", chat).status == 200
        assert front.request("GET", "/v1/models").json()["data"][0]["id"] == "tiny"
        # The router knows texts in pieces of 32 characters.
        assert front.metric('tokens_total{kind="cached"}') >= 4 * (len(PROMPT) // 32 * 32 - 16)
        assert front.metric("server_sequences") == 0


def test_a_server_that_fails_before_the_first_byte_is_replaced_unseen(tiny_model: Path) -> None:
    with sim_server(tiny_model) as good, misbehaving(b"") as bad, routing(bad, good.url) as front:
        front.until(lambda: front.servers.num_up == 2)
        for i in range(6):
            assert front.post("/v1/completions", body_of(f"prompt {i}", stream=i % 2 == 0)).status == 200
        assert front.metric("retries_total") >= 1


def test_a_server_that_is_busy_leaves_it_to_another(tiny_model: Path) -> None:
    busy = (
        b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 7\r\ncontent-length: 2\r\n"
    )
    with sim_server(tiny_model) as good, misbehaving(busy + b"\r\n{}") as bad:
        with routing(bad, good.url) as front:
            front.until(lambda: front.servers.num_up == 2)
            assert [front.post("/v1/completions", body_of(f"{i}")).status for i in range(4)] == [200] * 4
        with routing(bad) as front:
            front.until(lambda: front.servers.num_up == 1)
            reply = front.post("/v1/completions", body_of())
            assert (reply.status, reply.headers["retry-after"]) == (429, "7")


def test_a_stream_that_breaks_midway_ends_with_an_error_event() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    piece = b'data: {"choices": []}\n\n'
    with misbehaving(head + b"%x\r\n%b\r\n" % (len(piece), piece)) as bad, routing(bad) as front:
        front.until(lambda: front.servers.num_up == 1)
        reply = front.post("/v1/completions", body_of(stream=True))
        *_, last = [one for one in reply.text.split("\n\n") if one]
        assert reply.status == 200 and reply.text.startswith(piece.decode())
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_lost"
        assert front.metric("broken_total") == 1


def test_without_servers_clients_are_told_to_come_back(tiny_model: Path) -> None:
    with sim_server(tiny_model) as a, routing(a.url) as front:
        front.until(lambda: front.servers.num_up == 1)
        gone = a.url
    with routing(gone) as front:
        reply = front.post("/v1/completions", body_of())
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        health = front.request("GET", "/health")
        assert health.status == 503 and health.json()["servers"][0]["reason"]
        assert front.request("GET", "/v1/models").status == 503


def test_servers_of_different_models_are_refused_by_name(tiny_model: Path) -> None:
    with sim_server(tiny_model) as a, sim_server(tiny_model, "other") as b, routing(a.url, b.url) as front:
        front.until(lambda: front.servers.num_up == 1)
        reasons = [one["reason"] for one in front.request("GET", "/health").json()["servers"] if not one["up"]]
        front.until(lambda: "not reached" not in front.request("GET", "/health").text)
        reasons = [one["reason"] for one in front.request("GET", "/health").json()["servers"] if not one["up"]]
        assert len(reasons) == 1 and "tiny" in reasons[0] and "other" in reasons[0]
        known = front.servers.models[0]
        assert front.post("/v1/completions", body_of(model=known)).status == 200
        assert front.post("/v1/completions", body_of(model="third")).status == 404


def test_a_server_whose_cache_is_not_told_is_guessed(tiny_model: Path) -> None:
    from quire.server.settings import ApiKey

    keys = (ApiKey("a", "key-a", False), ApiKey("b", "key-b", False))
    with sim_server(tiny_model, api_keys=keys) as a, routing(a.url, api_key="key-a") as front:
        front.until(lambda: front.servers.num_up == 1)
        assert not front.servers.all[a.url].is_exact
        key = {"authorization": "Bearer key-b"}
        for _ in range(2):
            assert front.post("/v1/completions", body_of(), **key).status == 200
        assert front.metric('tokens_total{kind="cached"}') > 0
        assert front.post("/v1/completions", body_of()).status == 401


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"no json", 400),
        ("/v1/completions", b"[]", 400),
        ("/v1/files", b"{}", 404),
        ("/v1/completions", b'{"model": "tiny", "prompt": "x", "max_tokens": -1}', 400),
    ],
)
def test_bad_requests(tiny_model: Path, path: str, body: bytes, status: int, shared_front: Front) -> None:
    reply = shared_front.request("POST", path, body)
    assert reply.status == status and reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def shared_front(tiny_model: Path) -> Iterator[Front]:
    with sim_server(tiny_model) as a, routing(a.url) as front:
        front.until(lambda: front.servers.num_up == 1)
        yield front


@pytest.mark.parametrize("urls", [(), ("a:8000",), ("http://a:1/v1",), ("ftp://a",), ("http://a:1", "http://a:1/")])
def test_addresses_are_checked(urls: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        Servers(urls)
