"""The whole of it: HTTP here, a tiny model with random weights in an engine process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from observing_fakes import eventually
from openapi_strategies import of_schema
from server_harness import Server, real_engine, running

from quire.server.openapi import openapi_document

SCHEMAS = openapi_document()["components"]["schemas"]


@pytest.fixture(scope="module")
def real(tiny_model: Path) -> Iterator[Server]:
    with running(real_engine(tiny_model, max_model_len=128, max_num_seqs=16), served_model_names=("tiny",)) as server:
        yield server


def num_errors(server: Server) -> str:
    """What the alert looks at."""
    lines = server.get("/metrics").text.splitlines()
    return next(one for one in lines if "request_success_total{" in one and 'finished_reason="error"' in one)


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_left_is_the_senders_mistake(real: Server, stream: bool) -> None:
    (a,) = real.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    before = num_errors(real)
    body = {"prompt": ["x", "y"], "allowed_token_ids": [a], "bad_words": ["aaa"], "stream": stream}
    reply = real.post("/v1/completions", body)
    # A stream has begun by the third token, unless the engine was there before the first was passed on.
    has_begun = stream and reply.status == 200
    error = (reply.events()[-1] if has_begun else reply.json())["error"]
    assert has_begun or reply.status == 400
    assert error["type"] == "invalid_request_error" and "no token is left to sample" in error["message"]
    assert num_errors(real) == before
    contradiction = real.post("/v1/completions", body | {"min_tokens": 1, "stop_token_ids": [a]})
    assert (contradiction.status, contradiction.json()["error"]["param"]) == (400, "allowed_token_ids")


def metric(server: Server, name: str) -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0},
        {"seed": 3, "n": 3},
        {"seed": 4, "prompt": ["one", "two", [60, 61, 62]], "n": 2},
        {"temperature": 0, "echo": True, "logprobs": 3},
        {"temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 0},
        {"seed": 5, "presence_penalty": 1.0, "logit_bias": {"70": 5.0}, "top_k": 20, "min_p": 0.01},
    ],
)
def test_streamed_equals_unstreamed(real: Server, extra: dict[str, Any]) -> None:
    body = {"prompt": "Hello", "max_tokens": 24, "ignore_eos": True, "skip_special_tokens": False, **extra}
    whole = real.post("/v1/completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = real.post("/v1/completions", body | options).events()
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][count] == whole["usage"][count]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in parts) == choice["text"]
        if choice["logprobs"] is not None:
            assert [t for c in parts for t in c["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_a_prompt_seen_before_is_told_as_cached(real: Server) -> None:
    body = {"prompt": "a prompt of more than one block, which has sixteen tokens", "max_tokens": 1}
    real.post("/v1/completions", body)
    details = real.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 16
    salted = real.post("/v1/completions", body | {"cache_salt": "mine"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_official_client(real: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
            whole = await create(**ask, logprobs=True, top_logprobs=2)
            texts = await asyncio.gather(*(read(create(**ask, stream=True)) for _ in range(8)))
            assert set(texts) == {whole.choices[0].message.content}
            assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens

    async def read(created: Any) -> str:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in await created])

    asyncio.run(main())


def test_a_client_that_hangs_up_frees_its_blocks(real: Server) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", real.port, timeout=10)
    body = json.dumps({"prompt": "x", "max_tokens": 120, "n": 8, "ignore_eos": True, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read(10)
    response.close()
    connection.close()
    eventually(lambda: not metric(real, "vllm:num_requests_running") and not metric(real, "vllm:kv_cache_usage_perc"))


def test_what_only_the_scheduler_can_refuse(real: Server) -> None:
    reply = real.post("/v1/completions", {"prompt": "x", "n": 64, "max_tokens": 1})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_allowed_bodies_never_break_the_engine(real: Server, path: str) -> None:
    """Numbers at the edges of what the document allows reach the sampler."""
    name = {"/v1/completions": "CompletionBody", "/v1/chat/completions": "ChatBody"}[path]

    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(of_schema(SCHEMAS[name], SCHEMAS))
    def run(body: dict[str, Any]) -> None:
        body |= {"model": "tiny", "timeout": None}
        body["n"] = min(body.get("n") or 1, 3)
        reply = real.post(path, body)
        assert reply.status < 500, (body, reply.text)
        if reply.status == 200 and body.get("stream"):
            assert all("error" not in event for event in reply.events()), (body, reply.text)

    run()
    assert real.get("/health").status == 200


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "top_p", "min_p"])
@pytest.mark.parametrize("value", [1e-300, 1e-38, 1e-7, 1.0, 100.0])
def test_numbers_at_the_edge(real: Server, field: str, value: float) -> None:
    for logprobs in (None, 2):
        reply = real.post("/v1/completions", {"prompt": "x", "max_tokens": 3, field: value, "logprobs": logprobs})
        assert reply.status in (200, 400), reply.text
    assert real.get("/health").status == 200


def test_beams_are_the_likeliest_answers_and_the_best_comes_first(real: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 12, "use_beam_search": True, "logprobs": 0}
    wide = real.post("/v1/completions", body | {"n": 4}).json()
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in wide["choices"]]
    assert len(sums) == 4 and sums == sorted(sums, reverse=True)
    assert wide["usage"]["completion_tokens"] == 48
    some = real.post("/v1/completions", body | {"n": 2, "best_of": 4}).json()
    assert [one["text"] for one in some["choices"]] == [one["text"] for one in wide["choices"][:2]]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "use_beam_search": True, "n": 3}
    answer = real.post("/v1/chat/completions", chat).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    refused = real.post("/v1/completions", body | {"n": 17})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "beam_width")
    refused = real.post("/v1/completions", body | {"stream": True})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "stream")
