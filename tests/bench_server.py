"""A small OpenAI-compatible server that can misbehave, in the event loop of the test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """`faults` are taken one per request: an HTTP status, "disconnect", "early end", "garbage" or "error event"."""

    faults: list[Any] = field(default_factory=list)
    token_s: float = 0.0
    first_s: float = 0.0
    sends_usage: bool = True
    metrics: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_running: int = 0
    max_running: int = 0
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "slow down, please"}}, status=fault)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            return await self._stream(request, body, fault)
        finally:
            self.num_running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], fault: Any) -> web.StreamResponse:
        is_chat = request.path.endswith("chat/completions")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(record: Any) -> None:
            text = record if isinstance(record, str) else json.dumps(record)
            await response.write(f": a comment\n\ndata: {text}\n\n".encode())

        if is_chat:  # the role alone, long before a token
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.first_s)
        num_out = body["max_completion_tokens"] if is_chat else body["max_tokens"]
        for i in range(num_out):
            if i == 1 and fault == "disconnect":
                assert request.transport is not None
                request.transport.abort()
                return response
            if i == 1 and fault == "early end":
                return response
            if i == 1 and fault == "garbage":
                await send("{not json")
            if i == 1 and fault == "error event":
                await send({"error": {"message": "out of blocks"}})
            await send({"choices": [{"delta": {"content": "x"}} if is_chat else {"text": "x"}]})
            await asyncio.sleep(self.token_s)
        if self.sends_usage:
            await send({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_out}})
        await send("[DONE]")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake-model"}]})

    async def read_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics) if self.metrics is not None else web.Response(status=404)


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/metrics", server.read_metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def serving_in_a_thread(server: FakeServer) -> Iterator[FakeServer]:
    """For a client that has its own event loop in the main thread."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def go() -> None:
        async with serving(server):
            started.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(go(),))
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()
