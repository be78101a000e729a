from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from quire.server import limits
from quire.server.errors import ApiError
from quire.server.limits import BodyLimits


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
    monkeypatch.setattr(limits, "_LINGER_BYTES", 30)
    exchange = Exchange([b"012345"] * 50)
    assert exchange.run() == 413
    assert exchange.num_read < 10
    monkeypatch.setattr(limits, "_LINGER_S", 0.05)
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
