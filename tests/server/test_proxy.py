"""`quire router` in front of real servers with simulated engines, and of servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from observing_fakes import eventually
from server_harness import Address, Server, running
from sim_engine import SimSettings, sim_options

from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.errors import ConfigError
from quire.router.servers import Servers
from quire.server.listen import open_socket
from quire.server.proxy import run_proxy
from quire.server.settings import ServerSettings


class Front(Address):
    """A router that runs in a thread of its own."""

    def __init__(self, port: int, servers: Servers) -> None:
        super().__init__(port)
        self.servers = servers
        self.stop: Callable[[], Any]
        self.stop_at_once: Callable[[], Any]

    def metric(self, name: str) -> float:
        page = self.request("GET", "/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in page if line.startswith(f"quire:router_{name}"))


@contextlib.contextmanager
def routing(*urls: str, **options: Any) -> Iterator[Front]:
    settings = ServerSettings(port=0)
    listener = open_socket(settings)
    started = threading.Event()
    made: list[Any] = []

    async def serve() -> None:
        servers, stop, at_once = Servers(urls, **options), asyncio.Event(), asyncio.Event()
        made.extend((asyncio.get_running_loop(), servers, stop, at_once))
        started.set()
        await run_proxy(servers, listener, settings, stop, at_once)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(60)
    loop, servers, stop, _ = made
    front = Front(listener.getsockname()[1], servers)
    front.stop, front.stop_at_once = (lambda event=event: loop.call_soon_threadsafe(event.set) for event in made[2:])
    try:
        yield front
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


def sim_server(
    model: Path, name: str = "tiny", *, step_s: float = 0.005, **settings: Any
) -> contextlib.AbstractContextManager[Server]:
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu", block_size=4)
    client = EngineClient(config, sim_options(SimSettings(step_s=step_s)))
    return running(client, served_model_names=(name,), **settings)


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
        eventually(lambda: front.servers.num_up == 2)
        assert all(one.is_exact for one in front.servers.all.values()) and front.servers.router.block_size == 4
        expected = a.post("/v1/completions", body_of("another")).json()["choices"][0]["text"]
        assert front.post("/v1/completions", body_of("another")).json()["choices"][0]["text"] == expected
        events = front.post("/v1/completions", body_of("another", stream=True)).events()
        assert "".join(event["choices"][0]["text"] for event in events) == expected
        first = front.post("/v1/completions", body_of()).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        # What the servers publish is what routes: no ticket is open any more.
        eventually(lambda: front.metric("server_cached_blocks") >= len(PROMPT) // 4)
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
        eventually(lambda: front.servers.num_up == 2)
        for i in range(6):
            assert front.post("/v1/completions", body_of(f"prompt {i}", stream=i % 2 == 0)).status == 200
        assert front.metric("retries_total") >= 1


def test_a_server_that_is_busy_leaves_it_to_another(tiny_model: Path) -> None:
    busy = (
        b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 7\r\ncontent-length: 2\r\n"
    )
    with sim_server(tiny_model) as good, misbehaving(busy + b"\r\n{}") as bad:
        with routing(bad, good.url) as front:
            eventually(lambda: front.servers.num_up == 2)
            assert [front.post("/v1/completions", body_of(f"{i}")).status for i in range(4)] == [200] * 4
        with routing(bad) as front:
            eventually(lambda: front.servers.num_up == 1)
            reply = front.post("/v1/completions", body_of())
            assert (reply.status, reply.headers["retry-after"]) == (429, "7")


def test_a_stream_that_breaks_midway_ends_with_an_error_event() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    piece = b'data: {"choices": []}\n\n'
    with misbehaving(head + b"%x\r\n%b\r\n" % (len(piece), piece)) as bad, routing(bad) as front:
        eventually(lambda: front.servers.num_up == 1)
        reply = front.post("/v1/completions", body_of(stream=True))
        *_, last = [one for one in reply.text.split("\n\n") if one]
        assert reply.status == 200 and reply.text.startswith(piece.decode())
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "server_lost" and bad in error["message"]  # nothing is said again
        assert front.metric("broken_total") == 1


def test_a_stream_of_messages_that_breaks_midway_ends_as_its_clients_read_errors() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    piece = b'event: ping\ndata: {"type": "ping"}\n\n'
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": True}
    with misbehaving(head + b"%x\r\n%b\r\n" % (len(piece), piece)) as bad, routing(bad) as front:
        eventually(lambda: front.servers.num_up == 1)
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{front.port}", api_key="none", max_retries=0)
        with client, pytest.raises(anthropic.APIStatusError, match="failed in mid-answer"):
            list(client.messages.create(**body))
        eventually(lambda: not front.servers.num_up)
        refused = front.post("/v1/messages", body)
        assert refused.status == 503 and refused.json()["type"] == "error"


@pytest.mark.parametrize("is_hurried", [False, True])
def test_a_router_that_is_stopped_lets_its_requests_finish_or_tells_them(is_hurried: bool, tiny_model: Path) -> None:
    with sim_server(tiny_model, step_s=0.02) as server, routing(server.url) as front:
        eventually(lambda: front.servers.num_up == 1)
        threading.Timer(0.4, front.stop).start()
        if is_hurried:
            threading.Timer(0.6, front.stop_at_once).start()
        reply = front.post("/v1/completions", body_of("hello", stream=True, max_tokens=100, ignore_eos=True))
        assert reply.status == 200
        if is_hurried:
            assert events_of(reply.text)[-1]["error"]["code"] == "stopped"
        else:
            assert reply.text.endswith("data: [DONE]\n\n") and "error" not in reply.text


class Wire:
    """What lies between a router and a server, until it is cut: as a machine that is gone looks from afar."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._port = port
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._ends.append(near := self._listener.accept()[0])
                self._ends.append(far := socket.create_connection(("127.0.0.1", self._port)))
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._carry, args=pair))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for end in (self._listener, *self._ends):
            end.close()


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(one.removeprefix("data: ")) for one in text.split("\n\n") if one.startswith("data: {")]


@pytest.mark.parametrize("how", ["the engine is killed", "the machine is gone", "the server is stopped"])
def test_a_stream_goes_on_at_another_server(tiny_model: Path, how: str) -> None:
    """No token is lost or sent twice, in text, tokens, usage and ids, and whoever waits for more gets more."""
    common: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "stream": True, "return_token_ids": True}
    common |= {"stream_options": {"include_usage": True}, "model": "tiny"}
    paths = {
        "/v1/completions": common | {"prompt": "Once upon", "temperature": 0.9, "seed": 7},
        "/v1/chat/completions": common | {"messages": [{"role": "user", "content": "Grüße?"}], "temperature": 0.0},
    }
    with contextlib.ExitStack() as stack:
        servers = [sim_server(tiny_model, step_s=0.03) for _ in range(2)]
        other = stack.enter_context(servers[1])
        first_stack = stack.enter_context(contextlib.ExitStack())
        first = first_stack.enter_context(servers[0])
        wire = Wire(first.port)
        stack.callback(wire.cut)
        expected = {path: other.post(path, body) for path, body in paths.items()}
        front = stack.enter_context(routing(wire.url, other.url))
        eventually(lambda: front.servers.num_up == 2)
        front.servers.router.set_open(other.url, False)
        begun, got = threading.Barrier(len(paths) + 1), {}

        def read(path: str) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
            body = json.dumps(paths[path]).encode()
            connection.request("POST", path, body, {"content-type": "application/json", "x-request-id": path[4:]})
            response = connection.getresponse()
            data = b"".join(response.readline() for _ in range(9))
            begun.wait(60)
            got[path] = (data + response.read()).decode()
            connection.close()

        readers = [threading.Thread(target=read, args=(path,)) for path in paths]
        for reader in readers:
            reader.start()
        begun.wait(60)
        front.servers.router.set_open(other.url, True)
        if how == "the engine is killed":
            os.kill(first.engine.pid, signal.SIGKILL)
        elif how == "the machine is gone":
            wire.cut()
        else:
            first_stack.close()
        for reader in readers:
            reader.join(60)
        for path, reply in expected.items():
            assert got[path].endswith("data: [DONE]\n\n") and ": tokens" not in got[path]
            undisturbed, chunks = events_of(reply.text), events_of(got[path])
            assert told(chunks) == told(undisturbed)
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert chunks[-1]["usage"]["completion_tokens"] == 60
        assert front.metric("resumed_total") == 2 and front.metric("broken_total") == 0


def told(chunks: list[dict[str, Any]]) -> tuple[str, list[int], list[str], list[str]]:
    """The text, tokens, roles and ends of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice.get("delta", {"content": choice.get("text")}) for choice in choices]
    return (
        "".join(delta.get("content") or "" for delta in deltas),
        [token for choice in choices for token in choice["token_ids"]],
        [delta["role"] for delta in deltas if "role" in delta],
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
    )


def test_what_cannot_go_on_after_tokens_is_refused(tiny_model: Path) -> None:
    with sim_server(tiny_model) as server:
        whole = server.post("/v1/completions", body_of(return_token_ids=True)).json()["choices"][0]
        half = {"continued_token_ids": whole["token_ids"][:5]}
        rest = server.post("/v1/completions", body_of(stream=True, **half)).events()
        assert whole["text"].endswith("".join(one["choices"][0]["text"] for one in rest))
        for wrong in (
            {},
            {"stream": True, "n": 2, "temperature": 1.0},
            {"stream": True, "logprobs": 1},
            {"stream": True, "max_tokens": 5},
        ):
            reply = server.post("/v1/completions", body_of() | half | wrong)
            assert (reply.status, reply.json()["error"]["param"]) == (400, "continued_token_ids")
        stops = {"stop": [whole["text"][2:4]], "stream": True}  # it has come already
        for wrong in ({"continued_token_ids": [1_000_000], "stream": True}, half | stops):
            assert server.post("/v1/completions", body_of() | wrong).status == 400
        assert server.post("/v1/completions", body_of()).json()["choices"][0]["text"] == whole["text"]


def test_without_servers_clients_are_told_to_come_back(tiny_model: Path) -> None:
    with sim_server(tiny_model) as a, routing(a.url) as front:
        eventually(lambda: front.servers.num_up == 1)
        gone = a.url
    with routing(gone) as front:
        reply = front.post("/v1/completions", body_of())
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        health = front.request("GET", "/health")
        assert health.status == 503 and health.json()["servers"][0]["reason"]
        assert front.request("GET", "/v1/models").status == 503


def test_servers_of_different_models_are_refused_by_name(tiny_model: Path) -> None:
    with sim_server(tiny_model) as a, sim_server(tiny_model, "other") as b, routing(a.url, b.url) as front:
        eventually(lambda: front.servers.num_up == 1)
        reasons = [one["reason"] for one in front.request("GET", "/health").json()["servers"] if not one["up"]]
        eventually(lambda: "not reached" not in front.request("GET", "/health").text)
        reasons = [one["reason"] for one in front.request("GET", "/health").json()["servers"] if not one["up"]]
        assert len(reasons) == 1 and "tiny" in reasons[0] and "other" in reasons[0]
        known = front.servers.models[0]
        assert front.post("/v1/completions", body_of(model=known)).status == 200
        assert front.post("/v1/completions", body_of(model="third")).status == 404


def test_another_model_of_the_same_name_is_refused(tiny_model: Path) -> None:
    with sim_server(tiny_model) as a, sim_server(tiny_model) as b:
        for server, told in ((a, "aaaa"), (b, "bbbb")):
            server.engine.info = dataclasses.replace(server.engine.info, fingerprint=told)
        with routing(a.url, b.url) as front:
            eventually(lambda: front.servers.num_up == 1)
            eventually(lambda: "not reached" not in front.request("GET", "/health").text)
            reasons = [one["reason"] for one in front.request("GET", "/health").json()["servers"] if not one["up"]]
            assert len(reasons) == 1 and "aaaa" in reasons[0] and "bbbb" in reasons[0]
            assert front.post("/v1/completions", body_of()).status == 200


def test_when_the_last_server_is_lost_its_streams_end_with_its_name(tiny_model: Path) -> None:
    with sim_server(tiny_model, step_s=0.03) as server, routing(server.url) as front:
        eventually(lambda: front.servers.num_up == 1)
        killer = threading.Timer(0.5, lambda: os.kill(server.engine.pid, signal.SIGKILL))
        killer.start()
        reply = front.post("/v1/completions", body_of("hello", stream=True, max_tokens=100))
        killer.join()
        *_, last = events_of(reply.text)
        assert last["error"]["code"] == "server_lost" and server.url in last["error"]["message"]
        assert "[DONE]" not in reply.text and front.metric("broken_total") == 1
        eventually(lambda: not front.servers.num_up)
        assert front.post("/v1/completions", body_of()).status == 503


def test_a_server_whose_cache_is_not_told_is_guessed(tiny_model: Path) -> None:
    from quire.server.settings import ApiKey

    keys = (ApiKey("a", "key-a", False), ApiKey("b", "key-b", False))
    with sim_server(tiny_model, api_keys=keys) as a, routing(a.url, api_key="key-a") as front:
        eventually(lambda: front.servers.num_up == 1)
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
    reply = shared_front.request("POST", path, body, content_type="application/json")
    assert reply.status == status and reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/", "the router has no GET /: it passes POST requests on, and answers GET /health, /metrics"),
        ("DELETE", "/v1/models", "the router has no DELETE /v1/models"),
        ("GET", "/v1/files", "kept by one server"),
    ],
)
def test_what_is_not_routed_is_said_as_an_error(method: str, path: str, words: str, shared_front: Front) -> None:
    reply = shared_front.request(method, path)
    assert reply.status in (404, 405) and words in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def shared_front(tiny_model: Path) -> Iterator[Front]:
    with sim_server(tiny_model) as a, routing(a.url) as front:
        eventually(lambda: front.servers.num_up == 1)
        yield front


@pytest.mark.parametrize("urls", [(), ("a:8000",), ("http://a:1/v1",), ("ftp://a",), ("http://a:1", "http://a:1/")])
def test_addresses_are_checked(urls: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        Servers(urls)


@pytest.mark.parametrize("num_lines", [0, 3])
def test_a_client_that_hangs_up_is_not_computed_for(tiny_model: Path, num_lines: int) -> None:
    """Before its first token, and after some."""
    with sim_server(tiny_model, step_s=0.2) as server, routing(server.url) as front:
        eventually(lambda: front.servers.num_up == 1)
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
        body = json.dumps(body_of("hello", stream=True, max_tokens=100)).encode()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        if num_lines:
            response = connection.getresponse()
            assert all(response.readline() for _ in range(num_lines))
        else:
            eventually(lambda: front.metric("server_sequences") == 1)
        connection.close()
        if num_lines:
            response.close()
        eventually(lambda: front.metric("server_sequences") == 0)
        eventually(lambda: server.engine.load().num_running == 0)
        assert front.servers.num_up == 1 and front.metric("broken_total") == front.metric("retries_total") == 0
