from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from observing_fakes import eventually
from server_harness import MODEL, ScriptedEngine, Server, running

from quire.engine.api import EngineLoad
from quire.outputs import CompletionOutput, RequestOutput
from quire.server.endpoint import ClientGone
from quire.server.errors import ApiError
from quire.server.generation import Mailbox

LONG = {"prompt": "Hello", "max_tokens": 200}


@pytest.fixture(autouse=True)
def _engine_as_it_was(server: Server) -> Iterator[None]:
    yield
    engine = server.engine
    engine.step_s, engine.dies_after, engine.fails_after, engine.hangs_after = 0.0, None, None, None
    eventually(lambda: not engine.running)
    engine.left.clear()


def begin(server: Server, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave the answer to the test."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


@pytest.mark.parametrize("extra", [{"stream": True}, {"stream": False}, {"stream": True, "prompt": ["a", "b", "c"]}])
def test_a_client_that_hangs_up_frees_its_requests(server: Server, extra: dict[str, Any]) -> None:
    server.engine.step_s = 0.01
    num_prompts = len(extra.get("prompt", "a"))
    connection = begin(server, LONG | extra)
    eventually(lambda: len(server.engine.running) == num_prompts)
    if extra["stream"]:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    eventually(lambda: not server.engine.running)
    assert len(server.engine.left) == num_prompts
    eventually(lambda: not server.context.life.num_in_flight)
    assert server.context.first.admission.num_waiting == 0


def test_a_client_that_leaves_before_the_first_token(server: Server) -> None:
    server.engine.step_s = 30.0
    connection = begin(server, LONG | {"stream": True})
    eventually(lambda: server.engine.running)
    connection.close()
    eventually(lambda: not server.engine.running)


def test_the_first_token_leaves_at_once(server: Server) -> None:
    server.engine.hangs_after = 1
    connection = begin(server, {"prompt": "x", "max_tokens": 4, "stream": True})
    received = b""
    while b"data: " not in received:
        received += connection.recv(1000)
    assert received.count(b"data: ") == 1
    connection.close()


def test_a_slow_reader_gets_everything(server: Server) -> None:
    connection = begin(server, {"prompt": ["x"] * 40, "n": 2, "max_tokens": 200, "stream": True})
    time.sleep(0.2)
    received = bytearray()
    while b"[DONE]" not in received[-100:]:
        received += connection.recv(1 << 16)
    connection.close()
    assert received.count(b'"finish_reason":"length"') == 80


def test_an_engine_that_dies_before_the_first_token_is_a_503(server: Server) -> None:
    server.engine.dies_after = 0
    for stream in (True, False):
        reply = server.post("/v1/completions", LONG | {"stream": stream})
        assert (reply.status, reply.json()["error"]["code"]) == (503, "engine_dead")
        assert "/some/path" not in reply.text


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_an_engine_that_dies_in_a_stream_is_an_error_event(server: Server, prompt: Any) -> None:
    server.engine.dies_after = 3
    reply = server.post("/v1/completions", LONG | {"stream": True, "prompt": prompt})
    *_, error = reply.events()
    assert error["error"]["code"] == "engine_dead"
    assert set(error["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_sequence_that_fails_tells_no_details(server: Server, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.fails_after = 0
    with caplog.at_level(logging.ERROR):
        reply = server.post("/v1/completions", LONG | {"stream": stream})
    assert (reply.status, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in reply.text
    assert caplog.text.count("a request failed") == 1


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_the_deadline_is_a_504_or_an_error_event(server: Server, prompt: Any) -> None:
    server.engine.step_s = 0.02
    body = LONG | {"timeout": 0.15, "prompt": prompt}
    reply = server.post("/v1/completions", body)
    assert (reply.status, reply.json()["error"]["code"]) == (504, "timeout")
    *chunks, error = server.post("/v1/completions", body | {"stream": True}).events()
    assert chunks
    assert error["error"]["code"] == "timeout"
    eventually(lambda: not server.engine.running)


def test_the_official_client_does_not_send_again_what_took_too_long(server: Server) -> None:
    server.engine.step_s = 0.02
    server.engine.prepared.clear()
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as refused,
    ):
        client.completions.create(model=MODEL, prompt="x", max_tokens=200, extra_body={"timeout": 0.1})
    assert refused.value.status_code == 504
    assert len(server.engine.prepared) == 1


def test_what_may_go_better_later_is_not_marked(server: Server) -> None:
    server.engine.dies_after = 3
    reply = server.post("/v1/completions", LONG)
    assert reply.status == 503 and "x-should-retry" not in reply.headers


def test_the_deadline_may_be_a_header(server: Server) -> None:
    server.engine.step_s = 0.02
    assert server.post("/v1/completions", LONG, x_request_timeout="0.1").status == 504
    reply = server.post("/v1/completions", LONG, x_request_timeout="soon")
    assert (reply.status, reply.json()["error"]["param"]) == (400, "x-request-timeout")


def test_too_much_waiting_is_a_429(tiny_model: Any) -> None:
    engine = ScriptedEngine(tiny_model)
    engine.step_s = 0.3
    with running(engine, max_waiting_requests=2) as server:
        connections = [begin(server, LONG) for _ in range(2)]
        eventually(lambda: len(engine.running) == 2)
        reply = server.post("/v1/completions", LONG)
        assert (reply.status, reply.json()["error"]["code"]) == (429, "waiting_requests")
        assert int(reply.headers["retry-after"]) >= 1
        # All of a request's prompts, or none.
        assert server.post("/v1/completions", LONG | {"prompt": ["a", "b", "c"]}).status == 429
        assert len(engine.running) == 2
        for connection in connections:
            connection.close()
        eventually(lambda: server.context.first.admission.num_waiting == 0)


def test_a_brownout_shortens_and_says_so(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(tiny_model)
    monkeypatch.setattr(engine, "load", lambda: EngineLoad(brownout_level=2))
    with running(engine, brownout_max_tokens=5) as server:
        for stream in (True, False):
            reply = server.post("/v1/completions", {"prompt": "x", "stream": stream})
            assert (reply.status, reply.headers["x-quire-max-tokens"]) == (200, "5")
            assert "length" in reply.text
        assert reply.json()["usage"]["completion_tokens"] == 5


def test_one_request_is_one_line_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quire.server"):
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}, x_request_id="trace-1")
        server.post("/v1/completions", {"prompt": "x", "best_of": 9}, x_request_id="trace-2")
    eventually(lambda: len(caplog.records) == 2)
    (_, finished), (_, refused) = (record.quire_event for record in caplog.records)  # type: ignore[attr-defined]
    assert (finished["request_id"], finished["status"], finished["output_tokens"]) == ("trace-1", 200, 3)
    assert (finished["endpoint"], finished["model"]) == ("/v1/completions", MODEL)
    assert (refused["request_id"], refused["status"], refused["param"]) == ("trace-2", 400, "best_of")


def test_the_same_request_id_twice_at_once_is_two_requests(server: Server) -> None:
    server.engine.step_s = 0.02
    first = begin(server, LONG)
    eventually(lambda: server.engine.running)
    replies = [server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, x_request_id="same") for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 200]
    first.close()
    eventually(lambda: not server.engine.running)


def test_metrics_count_what_was_asked_and_refused(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "x", "nonsense": 1})
    text = server.get("/metrics").text
    assert 'quire:requests_started_total{endpoint="/v1/completions"' in text.replace('engine="0",endpoint', "endpoint")
    assert "unknown_field" in text


async def test_a_mailbox_tells_what_came_before_the_failure() -> None:
    box = Mailbox()
    output = RequestOutput("r", None, [1], [CompletionOutput(0, "x", [1])], False)
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(0, output)
    box.put(1, output)
    box.fail(ApiError(503, "gone"))
    box.fail(ClientGone())
    assert await waiting == [(0, output), (1, output)]
    with pytest.raises(ApiError):
        await box.take()
