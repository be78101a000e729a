"""The router's HTTP client, against a server that answers with given bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import pytest

from quire.router.http_client import HttpClient

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Scripted:
    """Answers each request with the next bytes of a script; None hangs up. Counts its connections."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self._answers = list(answers)
        self.num_connections = 0
        self.heads: list[bytes] = []
        self.tasks: list[asyncio.Task[None] | None] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.tasks.append(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if b"content-length: 3" in head:
                    assert await reader.readexactly(3) == b"abc"
                answer = self._answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                if b"connection: close" in answer or (b"length" not in answer and b"chunked" not in answer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def scripted(*answers: bytes | None) -> Callable[[Callable[[HttpClient, str, Scripted], Awaitable[None]]], None]:
    """Run a coroutine with a client and a server of these answers."""

    def run(test: Callable[[HttpClient, str, Scripted], Awaitable[None]]) -> None:
        async def main() -> None:
            script = Scripted(answers)
            server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
            client = HttpClient()
            async with asyncio.timeout(30):
                await test(client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", script)
                await client.close()
                server.close()
                await asyncio.gather(*(task for task in script.tasks if task is not None))

        asyncio.run(main())

    return run


async def ask(client: HttpClient, url: str) -> tuple[int, bytes]:
    reply = await client.ask("POST", url, b"/a", [(b"x-b", b"c")], b"abc")
    try:
        return reply.status, await reply.read()
    finally:
        reply.close()


def test_one_connection_serves_one_request_after_another() -> None:
    async def test(client: HttpClient, url: str, script: Scripted) -> None:
        assert await ask(client, url) == (200, b"hello")
        assert await ask(client, url) == (503, b"ab")
        reply = await client.ask("GET", url, b"/b?c=d")
        assert (reply.content_type, await reply.read(), reply.is_complete) == (b"text/plain", b"hello", True)
        reply.close()
        assert script.num_connections == 1
        assert script.heads[0].startswith(b"POST /a HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"x-b: c\r\n" in script.heads[0] and script.heads[2].startswith(b"GET /b?c=d HTTP/1.1\r\n")
        assert b"content-length" not in script.heads[2]

    refusal = b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
    early = b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n"
    scripted(early + WHOLE, refusal, WHOLE)(test)


def test_a_kept_connection_that_its_server_closes_is_replaced() -> None:
    async def test(client: HttpClient, url: str, script: Scripted) -> None:
        assert await ask(client, url) == (200, b"hello")
        assert await ask(client, url) == (200, b"hello")  # its second request there is met by a hang-up
        assert script.num_connections == 2 and len(script.heads) == 3
        assert await ask(client, url) == (200, b"hello")  # which says that it closes
        assert await ask(client, url) == (200, b"hello")
        assert script.num_connections == 3

    closing = WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    scripted(WHOLE, None, WHOLE, closing, WHOLE)(test)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def test(client: HttpClient, url: str, script: Scripted) -> None:
        assert await ask(client, url) == (200, b"all of it")

    scripted(b"HTTP/1.1 200 OK\r\n\r\nall of it")(test)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nhello",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + b"5\r\nhello\r\n",
        b"what is this\r\n\r\n",
        None,
    ],
)
def test_what_breaks_is_an_os_error(answer: bytes | None) -> None:
    async def test(client: HttpClient, url: str, script: Scripted) -> None:
        with pytest.raises(OSError):
            await ask(client, url)
        assert script.num_connections == 1

    scripted(answer)(test)


def test_nobody_there_is_an_os_error() -> None:
    async def test(client: HttpClient, url: str, script: Scripted) -> None:
        with pytest.raises(OSError):
            await ask(client, "http://127.0.0.1:1")
        with pytest.raises(OSError, match="longer than 4 bytes"):
            await (await client.ask("GET", url, b"/")).read(4)

    scripted(WHOLE)(test)


def test_an_answer_that_nobody_reads_stays_at_its_server() -> None:
    async def test(client: HttpClient, url: str, script: Scripted) -> None:
        reply = await client.ask("GET", url, b"/")
        await asyncio.sleep(0.2)
        first = await reply.read_some()
        assert len(first) < 8 << 20  # the rest waits in the sockets and in the server
        assert len(first) + len(await reply.read()) == 64 << 20
        reply.close()

    scripted(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20) + bytes(64 << 20))(test)
