"""Attacks with long texts, kept short: what they cost others, and that they stop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_harness import ScriptedEngine, Server, running

from quire.server.deadline import Deadline, DeadlineError
from quire.server.endpoint import ClientGone, Exchange
from quire.server.errors import UnavailableError
from quire.server.life import ServerLife, stopped
from quire.server.text_work import TextWork

LONG = 1_000_000
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def wide(tiny_model: Path) -> Iterator[Server]:
    """A server whose model takes prompts of 100,000 tokens."""
    with running(ScriptedEngine(tiny_model, max_model_len=100_000)) as server:
        yield server


def exchange(gone: asyncio.Event | None = None) -> Exchange:
    async def receive() -> Any:
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    return Exchange(None, {"headers": []}, receive, send, "r", "", "/")  # type: ignore[arg-type]


def run_with(main: Callable[[TextWork, threading.Event], Any]) -> None:
    """Runs it with one long work under way, which ends after it."""
    work, let_go = TextWork(), threading.Event()

    async def with_one_under_way() -> None:
        first = exchange()
        running = asyncio.create_task(work.run(first, Deadline(None, ServerLife()), let_go.wait, LONG))
        await asyncio.sleep(0)
        try:
            await main(work, let_go)
        finally:
            let_go.set()
        assert await running and not first.is_abandoned

    asyncio.run(with_one_under_way())


async def test_short_texts_stay_on_the_loop_and_chats_never_do() -> None:
    work, deadline, here = TextWork(), Deadline(None, ServerLife()), threading.get_ident()
    assert await work.run(exchange(), deadline, threading.get_ident, 10) == here
    assert await work.run(exchange(), deadline, threading.get_ident, 10, is_chat=True) != here
    assert await work.run(exchange(), deadline, threading.get_ident, LONG) != here


def test_nothing_queues_behind_a_long_text_but_long_ones() -> None:
    async def main(work: TextWork, let_go: threading.Event) -> None:
        deadline = Deadline(None, ServerLife())
        waiting = asyncio.create_task(work.run(exchange(), deadline, lambda: "long", LONG))
        assert await work.run(exchange(), deadline, lambda: "short", 10_000) == "short"
        assert not waiting.done()
        let_go.set()
        assert await waiting == "long"

    run_with(main)


def test_what_waits_is_ended_by_its_deadline_its_client_and_the_servers_stop() -> None:
    begun: list[str] = []

    async def main(work: TextWork, let_go: threading.Event) -> None:
        loop, life, gone = asyncio.get_running_loop(), ServerLife(), asyncio.Event()

        async def refused(error: type[Exception], deadline: Deadline, one: Exchange) -> None:
            with pytest.raises(error):
                await work.run(one, deadline, lambda: begun.append(error.__name__), LONG)
            assert one.is_abandoned

        # Its time began when it arrived, not when its turn comes.
        await refused(DeadlineError, Deadline(5.0, life, arrived_s=loop.time() - 5), exchange())
        loop.call_later(0.01, gone.set)
        await refused(ClientGone, Deadline(None, life), exchange(gone))
        loop.call_later(0.01, life.cut, stopped())
        await refused(UnavailableError, Deadline(None, life), exchange())

    run_with(main)
    assert not begun


def test_a_flood_of_long_bodies_delays_no_chat(wide: Server) -> None:
    """Each of them takes a fraction of a second, one after another: the chat is done before they are."""
    body = {"prompt": "1a.2b," * 12_000, "max_tokens": 1}
    done: list[int] = []
    with ThreadPoolExecutor(12) as clients:
        flood = [clients.submit(lambda: done.append(wide.post("/v1/completions", body).status)) for _ in range(12)]
        while not done:
            threading.Event().wait(0.01)
        reply = wide.post("/v1/chat/completions", CHAT, x_request_timeout="3")
        num_before = len(done)
        assert reply.status == 200, reply.text
    assert num_before < len(flood) and set(done) == {200}


def test_the_timeout_covers_tokenizing(wide: Server) -> None:
    reply = wide.post("/tokenize", {"prompt": "1a.2b," * 60_000}, x_request_timeout="0.01")
    assert reply.status == 504


def test_prompts_whose_client_left_are_not_tokenized(wide: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()
    prepare = wide.engine.prepare
    num_prepared = 0

    def slow(*args: Any, **options: Any) -> Any:
        nonlocal num_prepared
        num_prepared += 1
        begun.set()
        let_go.wait(20)
        try:
            return prepare(*args, **options)
        finally:
            ended.set()

    monkeypatch.setattr(wide.engine, "prepare", slow)
    body = json.dumps({"prompt": ["text " * 1_000] * 50}).encode()
    with socket.create_connection(("127.0.0.1", wide.port)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += "content-length: %d\r\n\r\n"
        client.sendall((head % len(body)).encode() + body)
        assert begun.wait(20)
    # The server has seen the end of the connection once it has served another one after it.
    assert wide.get("/v1/models").status == 200 and wide.get("/v1/models").status == 200
    let_go.set()
    assert ended.wait(20)
    # The lane is free again when what was left of it has ended.
    assert wide.post("/tokenize", {"prompt": "a " * 40_000}).status == 200
    assert num_prepared == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": " " * 100_000 + "1a.2b," * 200_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "1a.2b," * 200_000}]}),
        ("/v1/completions", {"prompt": " " * 100_000 + "1a.2b," * 200_000}),
        ("/v1/completions", {"prompt": "1a.2b," * 200_000, "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1a.2b," * 200_000}]}),
        ("/detokenize", {"tokens": [1] * 200_000}),
    ],
)
def test_what_is_far_too_long_is_refused_everywhere(server: Server, path: str, body: dict[str, Any]) -> None:
    reply = server.post(path, body)
    assert reply.status == 400, reply.text[:200]
    message = reply.json()["error"]["message"]
    assert "characters, and no token has more than" in message or "at most 65,536 are taken at once" in message
