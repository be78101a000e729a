from __future__ import annotations

from typing import Any

import openai
import pytest
from server_harness import TEXT, Server

from quire.request import cache_scope

SCRIPT = TEXT.encode()


def done(server: Server, **body: Any) -> dict[str, Any]:
    reply = server.post("/v1/completions", body)
    assert reply.status == 200, reply.text
    return dict(reply.json())


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    return server.post("/v1/completions", {"stream": True, **body}).events()


def joined(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_an_answer(server: Server) -> None:
    answer = done(server, model="tiny", prompt="Hello", max_tokens=9)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["system_fingerprint"].startswith("quire-")
    assert answer["choices"] == [
        {"index": 0, "text": SCRIPT[:9].decode(), "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_sixteen_tokens_unless_told_otherwise(server: Server) -> None:
    assert done(server, prompt="x")["usage"]["completion_tokens"] == 16


def test_cached_tokens_are_told(server: Server) -> None:
    usage = done(server, prompt="x" * 40, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 3},
        {"prompt": ["one", "two"], "n": 2},
        {"stop": ["token", "zzz"]},
        {"stop": "world"},
        {"stop": "is", "include_stop_str_in_output": True},
        {"echo": True},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "logprobs": 2},
        {"logprobs": 0, "n": 2},
        {"stop_token_ids": [SCRIPT[20]]},
        {"prompt": [71, 72, 73], "echo": True},
        {"return_token_ids": True},
        {"skip_special_tokens": False},
    ],
)
def test_streamed_equals_unstreamed(server: Server, extra: dict[str, Any]) -> None:
    body = {"prompt": "Hello", "max_tokens": 25, **extra}
    whole, chunks = done(server, **body), events(server, **body, stream_options={"include_usage": True})
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert joined(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [c["finish_reason"] for c in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [value for c in parts for value in c["logprobs"][name]] == values
        if "token_ids" in choice:
            assert [token for c in parts for token in c["token_ids"]] == choice["token_ids"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_a_token_is_a_chunk_and_half_a_character_is_none(server: Server) -> None:
    chunks = events(server, prompt="x", max_tokens=6)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["G", "r", "", "ü", "", "ß"]
    assert all("usage" not in chunk for chunk in chunks)


def test_choices_are_numbered_prompt_by_prompt(server: Server) -> None:
    answer = done(server, prompt=["one", [72, 73], "three"], n=2, max_tokens=2, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    prefixes = ["one", "one", "ij", "ij", "three", "three"]
    assert all(c["text"].startswith(prefix) for c, prefix in zip(answer["choices"], prefixes, strict=True))
    assert answer["usage"]["prompt_tokens"] == 3 + 2 + 5
    assert answer["usage"]["completion_tokens"] == 12


def test_echo_with_logprobs_and_no_tokens_is_the_prompts_own(server: Server) -> None:
    answer = done(server, prompt="aü", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("aü", "length")
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xbc"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_and_token_ids(server: Server) -> None:
    (choice,) = done(server, prompt="ab", max_tokens=2, prompt_logprobs=1, return_token_ids=True)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert set(choice["prompt_logprobs"][1]) == {
        str(choice["prompt_token_ids"][1]),
        str(choice["prompt_token_ids"][1] + 1),
    }
    assert len(choice["token_ids"]) == 2


def test_usage_so_far_in_every_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, prompt="abc", max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


def test_special_tokens_only_where_wanted(server: Server) -> None:
    ids = server.engine.tokenizer.encode("hi", add_special_tokens=False)
    (choice,) = done(server, prompt="hi", max_tokens=1, add_special_tokens=False, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == ids


def test_what_the_engine_gets(server: Server) -> None:
    done(server, prompt="hi", max_tokens=1, priority=-3, cache_salt="mine", seed=7, top_k=5)
    request = server.engine.prepared[-1].request
    assert (request.priority, request.salt, request.spec.seed, request.spec.top_k) == (
        -3,
        cache_scope("mine"),
        7,
        5,
    )


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": "x" * 300}, "prompt", "300"),
        ({"prompt": ["fine", "x" * 300]}, "prompt", "256"),
        ({"prompt": [1, "x"]}, "prompt", "mixes"),
        ({"prompt": [1, [2]]}, "prompt", "mixes"),
        ({"prompt": ["x"] * 2049}, "prompt", "at most 2,048 answers"),
        ({"prompt": ["x"] * 17, "n": 128}, "prompt", "send at most 16 prompts"),
        ({"prompt": ["x"] * 200, "max_tokens": 200, "logprobs": 20}, "logprobs", "lower max_tokens"),
        ({"prompt": ["x" * 100] * 300, "echo": True, "logprobs": 20}, "prompt_logprobs", "send fewer prompts"),
        ({"prompt": [5000]}, "prompt", "319"),
        ({"prompt": ""}, "prompt", "at least one"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "at its end only"),
        ({"prompt": "x", "best_of": 4}, "best_of", "n=1"),
        ({"prompt": "x", "deterministic": True}, "deterministic", "native CPU kernels"),
        ({"prompt": "x", "deterministic": True, "use_beam_search": True}, "deterministic", "batch_invariant"),
        ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"prompt": "x", "logit_bias": {"400": 1}}, "logit_bias", "319"),
        ({"prompt": "x", "n": 2, "temperature": 0}, "n", "equal"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"prompt": [65], "max_tokens": 256}, "max_tokens", "the prompt has 1, and max_tokens asks for 256 more"),
        (
            {"prompt": [[65], [65] * 9], "max_tokens": 255},
            "max_tokens",
            "the longest prompt has 9",
        ),
        ({"prompt": [65] * 255, "max_tokens": 2, "stream": True}, "max_tokens", "Ask for at most 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(server: Server, body: dict[str, Any], param: str, says: str) -> None:
    reply = server.post("/v1/completions", body)
    assert reply.status == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


def test_a_length_that_just_fits_is_taken_and_one_that_nobody_named_is_cut(server: Server) -> None:
    assert done(server, prompt=[65] * 250, max_tokens=6)["usage"]["completion_tokens"] == 6
    assert done(server, prompt=[65] * 250)["usage"]["completion_tokens"] == 6  # the default of 16 is not the sender's
    assert done(server, prompt=[65] * 250, max_tokens=None)["usage"]["completion_tokens"] == 6
    assert done(server, prompt=[65] * 255, max_tokens=0, echo=True)["usage"]["completion_tokens"] == 0


def test_an_unknown_model_is_a_404(server: Server) -> None:
    reply = server.post("/v1/completions", {"model": "gpt-4", "prompt": "x"})
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "'tiny'" in reply.json()["error"]["message"]


def test_what_a_benchmark_client_sends(server: Server) -> None:
    body = {
        "model": "tiny",
        "prompt": [71] * 20,
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": None,
        "ignore_eos": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = events(server, **body)
    assert all(chunk["choices"] for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)


def test_the_official_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="tiny", prompt="Hi", max_tokens=20, logprobs=2, n=2, seed=1)
        assert whole.choices[0].text == SCRIPT[:20].decode(errors="replace")
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.tokens or []) == 20
        chunks = list(client.completions.create(model="tiny", prompt="Hi", max_tokens=20, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="other", prompt="Hi")
        assert missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="Hi", suffix="there")
        assert (refused.value.param, refused.value.code) == ("suffix", "unsupported")
        batch = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2, extra_body={"top_k": 3})
        assert [choice.index for choice in batch.choices] == [0, 1]
