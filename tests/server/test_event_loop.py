"""No body up to the limit, whatever it holds, holds up the other clients: `running` fails if one does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_harness import ScriptedEngine, Server, running

LIMIT = 4 << 20
_MESSAGES = b'{"messages":[{"role":"user","content":"hi"}],'


def repeated(head: bytes, piece: bytes, tail: bytes) -> bytes:
    return head + piece * ((LIMIT - len(head) - len(tail)) // len(piece)) + tail


def numbered(head: bytes, form: bytes, number: int, tail: bytes) -> bytes:
    return head + b",".join(form % i for i in range(number)) + tail


BODIES = {
    "/v1/completions": {
        "text": repeated(b'{"prompt":"', b"a b ", b'"}'),
        "escapes": repeated(b'{"prompt":"', b"\\u00e4\\n", b'"}'),
        "quotes": repeated(b'{"prompt":"', b'[\\"{', b'"}'),
        "ids": repeated(b'{"prompt":[1', b",1", b"]}"),
        "long ids": repeated(b'{"prompt":[1', b",100000", b"]}"),
        "prompts": repeated(b'{"prompt":[""', b',""', b"]}"),
        "prompts of ids": repeated(b'{"prompt":[[1]', b",[1]", b"]}"),
        "allowed ids": repeated(b'{"prompt":"a","allowed_token_ids":[1', b",100000", b"]}"),
        "biases": numbered(b'{"prompt":"a","logit_bias":{', b'"%d":1', 300_000, b"}}"),
        "stops": repeated(b'{"prompt":"a","stop":["a"', b',"a"', b"]}"),
        "bad words": repeated(b'{"prompt":"a","bad_words":["a"', b',"a"', b"]}"),
        "spaces": repeated(b'{"prompt":"a"', b" ", b"}"),
        "a field's name": repeated(b'{"', b" - at `$", b'":1}'),
        "nested": repeated(b'{"prompt":', b"[", b""),
        "a model's name": repeated(b'{"prompt":"a","model":"', b"x", b'"}'),
    },
    "/v1/chat/completions": {
        "messages": repeated(b'{"messages":[{"role":"u"}', b',{"role":"u"}', b"]}"),
        "parts": repeated(
            b'{"messages":[{"role":"u","content":[{"type":"text","text":""}', b',{"type":"text","text":""}', b"]}]}"
        ),
        "a part's type": repeated(b'{"messages":[{"role":"u","content":[{"type":"', b"x", b'"}]}]}'),
        "a message": repeated(b'{"messages":[{"role":"u","content":"', b"a.b,", b'"}]}'),
        "tools": repeated(_MESSAGES + b'"tools":[[]', b",[]", b"]}"),
        "unused tools": repeated(_MESSAGES + b'"tool_choice":"none","tools":[1', b",1", b"]}"),
        "switches": repeated(_MESSAGES + b'"chat_template_kwargs":{"a":[[]', b",{}", b"]}}"),
        "metadata": numbered(_MESSAGES + b'"metadata":{', b'"%d":""', 300_000, b"}}"),
    },
    "/tokenize": {"text": repeated(b'{"prompt":"', b"1a.2b,", b'"}')},
    "/detokenize": {
        "ids": repeated(b'{"tokens":[1', b",1", b"]}"),
        "long": repeated(b'{"tokens":[1', b",100000", b"]}"),
    },
}


@pytest.fixture(scope="module")
def fresh(tiny_model: Path) -> Iterator[Server]:
    with running(ScriptedEngine(tiny_model)) as server:
        yield server


def assert_nobody_waits(server: Server, send: Callable[[], None]) -> None:
    """What holds the loop up does so each time it is sent; a busy machine costs one of them processor time too."""
    for _ in range(3):
        send()
        server.get("/ping")  # after the callback that sent the reply
        slow, server.slow[:] = list(server.slow), []
        if not slow:
            return
    raise AssertionError("\n".join(slow))


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, bodies in BODIES.items() for name in bodies])
def test_no_body_holds_the_others_up(fresh: Server, path: str, name: str) -> None:
    body = BODIES[path][name]
    assert len(body) <= LIMIT == fresh.context.settings.max_body_bytes

    def send() -> None:
        reply = fresh.request("POST", path, body, content_type="application/json")
        assert reply.status == {"spaces": 200, "a model's name": 404}.get(name, 400)
        assert len(reply.text) < 5_000

    assert_nobody_waits(fresh, send)


def test_bodies_of_the_size_that_people_send_are_taken(fresh: Server) -> None:
    """Text may hold whatever a program's source or a table does."""
    source = "if (a[i] == '{') { b[i] += \"x, y: z\"; }\n" * 40
    body = json.dumps({"prompt": source[:200], "user": source * 300, "max_tokens": 1}).encode()
    assert len(body) > 400_000
    assert fresh.request("POST", "/v1/completions", body, content_type="application/json").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_many_parts_hold_nobody_up(fresh: Server, stream: bool) -> None:
    """A body of a few bytes may ask for hundreds of thousands of logprobs, or for two thousand answers."""
    body = {"prompt": ["abcdefgh" * 25] * 100, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}

    def send() -> None:
        reply = fresh.post("/v1/completions", body)
        answers = reply.events() if stream else [reply.json()]
        found = [choice["logprobs"] for answer in answers for choice in answer["choices"] if choice["logprobs"]]
        assert sum(len(one["tokens"]) for one in found) == 100 * 201
        assert all(len(top) >= 20 for one in found for top in one["top_logprobs"] if top)
        many = fresh.post("/v1/completions", {"prompt": ["a"] * 2048, "max_tokens": 1, "stream": stream})
        assert many.status == 200

    assert_nobody_waits(fresh, send)
