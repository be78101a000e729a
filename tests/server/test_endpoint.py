from __future__ import annotations

import socket

import pytest
from server_harness import Server

BODY = {"prompt": "x", "max_tokens": 1}


def test_the_request_id_comes_back(server: Server) -> None:
    reply = server.post("/v1/completions", BODY, x_request_id="trace/7")
    assert reply.headers["x-request-id"] == "trace/7"
    assert reply.json()["id"] == "cmpl-trace/7"
    refused = server.post("/v1/completions", {}, x_request_id="trace/8")
    assert (refused.status, refused.headers["x-request-id"]) == (400, "trace/8")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
def test_an_id_that_cannot_be_shown_is_replaced(server: Server, given: str) -> None:
    reply = server.post("/v1/completions", BODY, x_request_id=given)
    assert len(reply.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/problem+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
    ],
)
def test_bodies_are_json(server: Server, content_type: str, status: int) -> None:
    reply = server.request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":1}', content_type=content_type)
    assert reply.status == status
    assert status == 200 or reply.json()["error"]["code"] == "unsupported_media_type"


def test_no_content_type_means_json(server: Server) -> None:
    assert server.request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":1}').status == 200


def test_a_body_in_pieces(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b'5\r\n{"pro\r\n')
        connection.sendall(b'9\r\nmpt":"x"}\r\n0\r\n\r\n')
        received = b""
        while part := connection.recv(1000):
            received += part
    assert b'"count":1' in received
