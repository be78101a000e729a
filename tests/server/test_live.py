from __future__ import annotations

import http.client
import json
from typing import Any

from live_harness import CoreEngine, make_core
from server_harness import Server, running

from quire.server.settings import ApiKey


def first_lines(server: Server, count: int, **headers: str) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", "/live", headers=headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.getheader("content-type") == "application/x-ndjson"
        assert response.getheader("cache-control") == "no-store"
        return [json.loads(response.readline()) for _ in range(count)]
    finally:
        connection.close()


def test_it_streams_lines() -> None:
    with running(CoreEngine(make_core()), served_model_names=("my-model",)) as server:
        hello, status, *_ = first_lines(server, 4)
        assert hello["type"] == "hello" and hello["model"] == "my-model" and hello["num_blocks"] == 64
        assert hello["row_fields"][0] == "seq_id"
        assert hello["chat"] == {"temperature": 0.7, "top_p": 0.95}
        assert status == {
            "type": "status",
            "state": "ready",
            "reason": "",
            "engines": ["0"],
            "models": {"my-model": "ready"},
        }


def test_a_look_at_its_headers_ends_and_takes_no_place() -> None:
    with running(CoreEngine(make_core())) as server:
        for _ in range(70):  # more than may look at once
            reply = server.request("HEAD", "/live")
            assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"


def test_it_takes_no_parameters() -> None:
    with running(CoreEngine(make_core())) as server:
        reply = server.get("/live?key=secret")
        assert reply.status == 400 and reply.json()["error"]["param"] == "key"


def test_it_is_behind_the_key() -> None:
    with running(CoreEngine(make_core()), api_keys=(ApiKey("one", "key-of-one-1"),)) as server:
        assert server.get("/live").status == 401
        assert first_lines(server, 1, authorization="Bearer key-of-one-1")[0]["type"] == "hello"
