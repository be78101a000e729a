"""The load generator against a server that misbehaves."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from bench_server import FakeServer, serving, serving_in_a_thread

from quire.bench.client import ClientRequest, Outcome, Target, find_model, run_load, server_address
from quire.cli.main import main
from quire.errors import ConfigError, QuireError


def load(
    server: FakeServer, requests: list[ClientRequest], arrivals: list[float] | None = None, **options: Any
) -> list[Outcome]:
    chat = options.pop("chat", False)
    body = options.pop("body", {})
    timeout_s = options.pop("timeout_s", 5.0)

    async def go() -> list[Outcome]:
        async with serving(server):
            target = Target(
                base_url=server.url,
                endpoint="/v1/chat/completions" if chat else "/v1/completions",
                model="m",
                api_key="secret",
                timeout_s=timeout_s,
                body=body,
            )
            return await run_load(target, requests, arrivals or [0.0] * len(requests), **options)

    return asyncio.run(go())


def test_tokens_and_times_of_a_stream() -> None:
    server = FakeServer(first_s=0.05, token_s=0.01)
    [outcome] = load(server, [ClientRequest([11, 12, 13], 5)], body={"temperature": 0.0, "ignore_eos": True})
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 5)  # the server's own count
    assert outcome.ttft_s is not None and outcome.e2e_s is not None
    assert 0.05 <= outcome.ttft_s < outcome.e2e_s
    assert len(outcome.itl_s) == 4 and min(outcome.itl_s) >= 0.005
    assert outcome.e2e_s == pytest.approx(outcome.ttft_s + sum(outcome.itl_s))
    [body] = server.bodies
    assert body["prompt"] == [11, 12, 13] and body["max_tokens"] == 5 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_chats_role_is_no_token() -> None:
    server = FakeServer(first_s=0.08)
    [outcome] = load(server, [ClientRequest("hello you", 3)], chat=True)
    assert outcome.error is None and outcome.output_tokens == 3
    assert outcome.ttft_s is not None and outcome.ttft_s >= 0.08
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello you"}]
    assert server.bodies[0]["max_completion_tokens"] == 3


def test_without_usage_chunks_are_counted() -> None:
    [outcome] = load(FakeServer(sends_usage=False), [ClientRequest([1, 2], 4)])
    assert (outcome.prompt_tokens, outcome.output_tokens) == (2, 4)


def test_every_kind_of_failure_is_counted_and_the_others_go_on() -> None:
    faults = [429, None, "disconnect", 503, "early end", "garbage", "error event", None]
    outcomes = load(FakeServer(faults=list(faults)), [ClientRequest([1], 3)] * 8, max_concurrency=1)
    assert len(outcomes) == 8
    errors = [outcome.error for outcome in outcomes]
    assert [error is None for error in errors] == [fault is None for fault in faults]
    assert errors[0] == "HTTP 429" and outcomes[0].detail == "slow down, please"
    assert errors[2] in ("disconnected in the stream", "connection reset", "disconnected")
    assert errors[3] == "HTTP 503"
    assert errors[4] == "the stream ended early"
    assert errors[5] == "not a stream of JSON"
    assert errors[6] == "error in the stream" and outcomes[6].detail == "out of blocks"
    assert all(outcome.e2e_s is None for outcome in outcomes if outcome.error)


def test_a_slow_server_times_out() -> None:
    [outcome] = load(FakeServer(first_s=5.0), [ClientRequest([1], 3)], timeout_s=0.1)
    assert outcome.error == "timeout"


def test_concurrency_is_capped() -> None:
    server = FakeServer(token_s=0.005)
    assert len(load(server, [ClientRequest([1], 3)] * 12, max_concurrency=3)) == 12
    assert server.max_running == 3


def test_requests_are_sent_at_their_times() -> None:
    times = [0.0, 0.1, 0.2]
    outcomes = load(FakeServer(), [ClientRequest([1], 1)] * 3, times)
    assert all(outcome.sent_s >= at for outcome, at in zip(outcomes, times, strict=True))


async def test_stopping_keeps_what_came_back() -> None:
    requests = [ClientRequest([1], 2)] * 3 + [ClientRequest([1], 100_000)]
    stop, seen = asyncio.Event(), list[Outcome]()

    def done(outcome: Outcome) -> None:
        seen.append(outcome)
        if len(seen) == 3:
            stop.set()

    async with serving(FakeServer(token_s=0.002)) as server:
        outcomes = await run_load(Target(base_url=server.url), requests, [0.0] * 4, stop=stop, on_done=done)
    assert len(outcomes) == 3 and all(outcome.error is None for outcome in outcomes)


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        base = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(QuireError, match=f"no server answers at {base} \\(connection refused\\)"):
            asyncio.run(find_model(Target(base_url=base)))
        [outcome] = asyncio.run(run_load(Target(base_url=base), [ClientRequest([1], 1)], [0.0]))
    assert outcome.error == "connection refused"


async def test_the_model_is_the_first_that_is_listed() -> None:
    async with serving(FakeServer()) as server:
        assert await find_model(Target(base_url=server.url)) == "fake-model"
        assert await find_model(Target(base_url=server.url, model="mine")) == "mine"


@pytest.mark.parametrize(
    ("base_url", "host", "port", "address"),
    [
        (None, None, None, "http://127.0.0.1:8000"),
        (None, "box", None, "http://box:8000"),
        (None, None, 8020, "http://127.0.0.1:8020"),
        (None, "::1", 80, "http://[::1]:80"),
        (None, "[::1]", 80, "http://[::1]:80"),
        ("http://box:8020/v1", None, None, "http://box:8020"),
        ("http://box:8020/v1//", None, None, "http://box:8020"),
        ("https://box/", None, None, "https://box"),
        ("https://box/models/v1", None, None, "https://box/models"),
        ("https://box/v11", None, None, "https://box/v11"),
    ],
)
def test_addresses(base_url: str | None, host: str | None, port: int | None, address: str) -> None:
    assert server_address(base_url, host, port) == address


@pytest.mark.parametrize(
    ("base_url", "host", "port", "words"),
    [
        ("http://box", "box", None, "leave --host and --port out"),
        ("http://box", None, 8000, "leave --host and --port out"),
        ("box:8000", None, None, "http://"),
        (None, "http://box", None, "--base-url"),
        (None, None, 0, "from 1 to 65535"),
    ],
)
def test_refusals(base_url: str | None, host: str | None, port: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        server_address(base_url, host, port)


def test_the_command_takes_each_of_them() -> None:
    flags = ["bench", "serve", "--num-prompts", "2", "--input-len", "5", "--output-len", "3"]
    with serving_in_a_thread(FakeServer()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        assert main([*flags, "--host", host, "--port", port]) == 0
        assert main([*flags, "--base-url", f"{server.url}/v1/"]) == 0
        assert main([*flags, "--base-url", server.url, "--port", port]) == 2
    assert len(server.bodies) == 4
