"""What a client sent is gone with its answer: at once, not when the garbage collector next looks at everything."""

from __future__ import annotations

import gc
import http.client
import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sim_engine
from server_harness import Server, running

from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.streams import Stream
from quire.request import Request, Sequence
from quire.server.endpoint import Exchange
from quire.server.protocol import ChatBody, CompletionBody

KINDS = (Request, Sequence, Stream, Exchange, CompletionBody, ChatBody)
PADDING = "x" * 200_000
MB = 1_000_000


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Server]:
    config = EngineConfig(model=str(tiny_model), load_format="dummy")
    with running(EngineClient(config, sim_engine.sim_options())) as server:
        yield server


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_alive() -> int:
    return sum(type(one) in KINDS for one in gc.get_objects())


def settled(read: Any, most: int) -> int:
    """A handler ends a moment after its answer is there."""
    until_s = time.monotonic() + 10
    while (value := read()) > most and time.monotonic() < until_s:
        time.sleep(0.01)
    return int(value)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"stream": True}, 200),
        ({"n": 3, "stop": "zzz"}, 200),
        ({"prompt": ["one", "two"]}, 200),
        ({"cache_salt": "x" * 1025}, 400),  # refused while it is decoded,
        ({"prompt": "x" * 500}, 400),  # when it is tokenized,
        ({"prompt": "x" * 5000}, 400),  # in a thread too,
        ({"best_of": 2}, 400),  # and for what contradicts itself
        ({"max_tokens": 190, "timeout": 1e-4}, 504),
        ({"max_tokens": 190, "timeout": 1e-4, "stream": True}, 504),
    ],
)
def test_nothing_of_a_request_outlives_it(served: Server, fields: dict[str, Any], status: int) -> None:
    before = num_alive()
    for _ in range(3):
        reply = served.post("/v1/completions", {"prompt": "hello", "max_tokens": 2, "user": PADDING} | fields)
        # A deadline may pass before a stream has begun, or after.
        assert reply.status == status or (status == 504 and '"code":"timeout"' in reply.text), reply.text
    assert settled(num_alive, before) <= before


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("content", "status"), [("hello", 200), ("x" * 300, 400)])
def test_nothing_of_a_chat_outlives_it(served: Server, content: str, status: int) -> None:
    before = num_alive()
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "user": PADDING}
    assert served.post("/v1/chat/completions", body).status == status
    assert settled(num_alive, before) <= before


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("prompt", ["hello", ["one", "two"]])
def test_nothing_of_a_request_outlives_its_client(served: Server, prompt: Any) -> None:
    before = num_alive()
    body = json.dumps({"prompt": prompt, "max_tokens": 190, "stream": True, "user": PADDING}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    connection.getresponse().readline()
    connection.close()
    assert settled(num_alive, before) <= before


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("field", "status"), [("cache_salt", 400), ("user", 200)])
def test_large_fields_leave_no_memory_behind(served: Server, field: str, status: int) -> None:
    served.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})
    tracemalloc.start()
    try:
        for i in range(8):
            body = {"prompt": "hello", "max_tokens": 1, field: f"{i}" + "x" * MB}
            assert served.post("/v1/completions", body).status == status
        del body
        # The event loop may hold the last one until its next turn.
        assert settled(lambda: tracemalloc.get_traced_memory()[0], 3 * MB) < 3 * MB
    finally:
        tracemalloc.stop()
