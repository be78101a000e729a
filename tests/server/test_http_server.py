"""Raw bytes against a real listening server: what HTTP clients never send and attackers do."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.server import http_server
from quire.server.endpoint import on_gone
from quire.server.http_server import HttpServer
from quire.server.listen import open_socket
from quire.server.settings import ServerSettings

_PATHS = ("/", "/slow", "/echo", "/until-gone", "/told", "/long", "/pieces")
Client = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def served(refused: list[tuple[Any, Any]] | None = None, **settings: Any) -> AsyncIterator[Client]:
    """A way to connect to a server that answers with the number of its request's headers, or as a path says. A
    client's `gone` is set when the server has noticed that it left."""
    gone = asyncio.Event()

    async def answer(request: Request) -> Response:
        body = await request.body()
        if request.url.path == "/slow":
            await asyncio.sleep(0.4)
        if request.url.path == "/echo":
            return Response(body)
        if request.url.path == "/until-gone":
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone.set()
        if request.url.path == "/told":
            on_gone(request.scope, request.receive, gone.set)
            await gone.wait()
        if request.url.path == "/long":
            return StreamingResponse(long_answer())
        if request.url.path == "/pieces":
            return StreamingResponse(iter([b"one ", b"", b"two"]))
        return JSONResponse(len(request.headers))

    async def long_answer() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 100_000
                await asyncio.sleep(0)
        finally:
            gone.set()

    writers = []

    async def client() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    wanted = ServerSettings(port=0, **settings)
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in _PATHS])
    listener = open_socket(wanted)
    port = listener.getsockname()[1]
    http = HttpServer(app, wanted, None, lambda *what: None if refused is None else refused.append(what))
    task = asyncio.create_task(http.run_on(listener))
    client.gone = gone  # type: ignore[attr-defined]
    try:
        async with asyncio.timeout(10):
            yield client
    finally:
        for writer in writers:
            writer.close()
        http.stop()
        await task


async def answer_to(client: Client, data: bytes) -> tuple[int, Any]:
    """Sends, and reads until the server closes."""
    reader, writer = await client()
    writer.write(data)
    reply = await reader.read()
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def test_a_plain_request_passes_and_the_server_does_not_name_itself() -> None:
    async with served() as client:
        reader, writer = await client()
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"uvicorn" not in head
        assert re.search(rb"date: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n", head)


@pytest.mark.parametrize(
    ("status", "code", "data"),
    [
        (431, "headers_too_large", b"GET / HTTP/1.1\r\nx: " + b"a" * 3000 + b"\r\n\r\n"),  # one piece
        (431, "headers_too_large", b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 500 + b"\r\n"),
        (431, "headers_too_large", b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n"),
        (431, "headers_too_large", b"GET / HTTP/1.1\r\nx: " + b"a" * 300_000),  # never ends
        (400, "invalid_http", b"\x16\x03\x01\x02\x00\x01\x00"),  # TLS to a plain port
        (400, "invalid_http", b"nonsense\r\n\r\n"),
        (400, "invalid_http", b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n"),
        (400, "invalid_http", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"),
        (400, "invalid_http", b"GET /\xff HTTP/1.1\r\n\r\n"),
        (405, None, b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n"),  # a proxy's method
    ],
)
async def test_what_comes_before_a_request_is_refused_in_the_shape_of_every_error(
    status: int, code: str | None, data: bytes
) -> None:
    async with served(max_header_bytes=2048) as client:
        found, body = await answer_to(client, data)
        assert (found, body["error"]["code"]) == (status, code)


async def test_the_limit_is_for_one_request_and_not_for_a_connections_sum() -> None:
    async with served(max_header_bytes=1024) as client:
        reader, writer = await client()
        for _ in range(10):
            head = b"POST / HTTP/1.1\r\nx: " + b"a" * 800 + b"\r\ncontent-length: 3000\r\n\r\n"
            for piece in (head[:400], head[400:], b"b" * 1500, b"b" * 1500):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readexactly(1)


async def test_headers_that_trickle_in_are_a_408_and_silence_is_closed() -> None:
    async with served(header_timeout_s=0.2) as client:
        reader, writer = await client()
        silent, _ = await client()

        async def trickle() -> None:
            for byte in b"GET / HTTP/1.1\r\nx: aaaaaaaaaaaaaaaaaaaaaaaaaaaa":
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(trickle())
        assert (await reader.read(20)).startswith(b"HTTP/1.1 408")
        dripping.cancel()
        assert await silent.read() == b""


async def test_a_next_request_has_a_deadline_of_its_own_that_a_running_one_does_not_lose_to() -> None:
    async with served(header_timeout_s=0.15) as client:
        reader, writer = await client()
        writer.write(b"GET /slow HTTP/1.1\r\n\r\nGET / HT")
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 200")
        assert reply.count(b"HTTP/1.1 408") == 1


async def test_an_idle_connection_is_closed_after_keep_alive() -> None:
    async with served(keep_alive_s=0.1, header_timeout_s=60.0) as client:
        reader, writer = await client()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"\r\n")  # is no request yet
        await asyncio.wait_for(reader.read(), 3)


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade"])
async def test_an_offer_of_another_protocol_is_passed_over(name: bytes) -> None:
    """java.net.http makes this offer with every request over plain HTTP."""

    async with served() as client:
        reader, writer = await client()
        head = b"POST /echo HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n" + name + b": h2c\r\n"
        for _ in range(2):  # and the connection goes on as it was
            writer.write(head + b"HTTP2-Settings: AAMAAABk\r\ncontent-length: 9\r\n\r\n\r\nUpgrade")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(9) == b"\r\nUpgrade"


_OFFER = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n\r\nbody"


async def read_echo(reader: asyncio.StreamReader) -> bytes:
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    return await reader.readexactly(4)


async def test_an_offer_that_comes_in_pieces_keeps_its_body() -> None:
    async with served() as client:
        for cut in range(1, len(_OFFER)):
            reader, writer = await client()
            writer.write(_OFFER[:cut])
            await asyncio.sleep(0.002)
            writer.write(_OFFER[cut:])
            assert await read_echo(reader) == b"body"
            writer.close()


async def test_pipelined_offers_keep_their_bodies() -> None:
    async with served() as client:
        reader, writer = await client()
        plain = _OFFER.replace(b"Upgrade: h2c\r\n", b"").replace(b"body", b"none")
        writer.write(_OFFER + plain + _OFFER * 2)
        assert [await read_echo(reader) for _ in range(4)] == [b"body", b"none", b"body", b"body"]


@pytest.mark.parametrize("path", [b"/", b"/slow", b"/pieces"])
async def test_a_client_that_has_said_all_gets_its_answer(path: bytes) -> None:
    async with served() as client:
        reader, writer = await client()
        writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write_eof()
        answer = (await reader.read()).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"0\r\n\r\n" if path == b"/pieces" else b"1")


async def test_a_client_that_has_said_all_of_several_requests_gets_every_answer() -> None:
    async with served() as client:
        reader, writer = await client()
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        writer.write_eof()
        assert (await reader.read()).count(b"HTTP/1.1 200") == 3


async def test_a_client_that_leaves_within_a_request_is_not_waited_for() -> None:
    async with served() as client:
        reader, writer = await client()
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf")
        writer.write_eof()
        assert await reader.read() == b""


async def test_connections_over_the_limit_of_open_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "max_connections", lambda: 2)
    refused: list[Any] = []

    async with served(refused) as client:
        kept = [await client() for _ in range(2)]
        for _, writer in kept:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        for reader, _ in kept:
            await reader.readuntil(b"\r\n\r\n")
        reader, _ = await client()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in answer
        kept[0][1].close()
        await asyncio.sleep(0.05)
        assert (await answer_to(client, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"))[0] == 200
    ((error, address),) = refused
    assert (error.code, address[0]) == ("too_many_connections", "127.0.0.1")


@pytest.mark.parametrize(("path", "body"), [(b"/pieces", b"one two"), (b"/", b"1")])
async def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_its_connection(path: bytes, body: bytes) -> None:
    async with served() as client:
        for method, wanted in ((b"GET", body), (b"HEAD", b"")):
            reader, writer = await client()
            writer.write(method + b" " + path + b" HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            head, _, found = (await reader.read()).partition(b"\r\n\r\n")
            assert found == wanted
            assert b"chunked" not in head
            assert b"connection: close" in head
            assert (b"content-length: 1" in head) == (path == b"/")
            writer.close()


async def test_a_client_that_sent_its_next_request_early_is_seen_to_leave() -> None:
    async with served() as client:
        _, writer = await client()
        writer.write(b"GET /until-gone HTTP/1.1\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n" * 2)
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.wait_for(client.gone.wait(), 2)  # type: ignore[attr-defined]


async def test_a_client_with_a_long_body_is_seen_to_leave() -> None:
    async with served() as client:
        _, writer = await client()
        with socket.create_connection(writer.get_extra_info("peername")) as connection:
            connection.sendall(b"POST /told HTTP/1.1\r\ncontent-length: 100000\r\n\r\n")
            await asyncio.sleep(0.1)
            connection.sendall(b" " * 100_000)  # in one piece: this is the server's event loop
            await asyncio.sleep(0.1)
        await asyncio.wait_for(client.gone.wait(), 2)  # type: ignore[attr-defined]


async def test_an_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.http_server._UNREAD_S", 0.3)

    async with served() as client:
        reader, writer = await client()
        writer.write(b"GET /long HTTP/1.1\r\n\r\n")
        for _ in range(20):  # a slow reader is no such client
            assert await reader.read(100_000)
            await asyncio.sleep(0.05)
        assert not client.gone.is_set()  # type: ignore[attr-defined]
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(client.gone.wait(), 5)  # type: ignore[attr-defined]
