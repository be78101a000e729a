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
        ("", 415),
        ("x" * 5_000, 415),
    ],
)
def test_bodies_are_json(server: Server, content_type: str, status: int) -> None:
    reply = server.request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":1}', content_type=content_type)
    assert reply.status == status
    if status != 200:
        error = reply.json()["error"]
        assert error["code"] == "unsupported_media_type"
        assert "send it with the header Content-Type: application/json" in error["message"]
        assert len(error["message"]) < 400


def test_a_body_without_a_content_type_is_refused(server: Server) -> None:
    """A page of another site may send one without asking first."""
    reply = server.request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":1}')
    assert reply.status == 415
    assert "has no content type" in reply.json()["error"]["message"]


def test_a_bodys_own_request_id_is_served_unless_a_header_has_one(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1, "request_id": "mine-1"}
    reply = server.post("/v1/completions", body)
    assert (reply.headers["x-request-id"], reply.json()["id"]) == ("mine-1", "cmpl-mine-1")
    reply = server.post("/v1/completions", body, x_request_id="header-1")
    assert (reply.headers["x-request-id"], reply.json()["id"]) == ("header-1", "cmpl-header-1")
    for bad in ("a b", "a\r\nset-cookie: x", "a\n", "ü", "", "x" * 129):
        refused = server.post("/v1/completions", body | {"request_id": bad})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "request_id")


def test_a_body_in_pieces(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
        head += b"content-type: application/json\r\n\r\n"
        connection.sendall(head + b'5\r\n{"pro\r\n')
        connection.sendall(b'9\r\nmpt":"x"}\r\n0\r\n\r\n')
        received = b""
        while part := connection.recv(1000):
            received += part
    assert b'"count":1' in received
