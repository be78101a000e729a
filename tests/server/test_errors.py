from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Literal

import msgspec
import pytest

from quire.errors import BadRequestError, EngineDeadError, TokenizerError
from quire.server.errors import ApiError, from_decode_error, to_api_error


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: int
    kind: Literal["a", "b"] = "a"


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    items: list[Inner]
    max_tokens: int = 0


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"{", None, "invalid_json"),
        (b"\xff", None, "invalid_json"),
        (b"", None, "invalid_json"),
        (b"[]", None, "invalid_value"),
        (b"{}", "items", "missing_field"),
        (b'{"items":[],"max_token":1}', "max_token", "unknown_field"),
        (b'{"items":[],"max_tokens":"1"}', "max_tokens", "invalid_value"),
        (b'{"items":[{"size":1},{"size":[]}]}', "items[1].size", "invalid_value"),
        (b'{"items":[{"size":1,"depth":2}]}', "items[0].depth", "unknown_field"),
    ],
)
def test_a_bad_body_names_the_field(body: bytes, param: str | None, code: str) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body, type=Outer)
    error = from_decode_error(caught.value, Outer.__struct_fields__)
    assert (error.status, error.param, error.code) == (400, param, code)


def test_an_unknown_field_comes_with_the_one_that_was_meant() -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(b'{"items":[],"max_token":1}', type=Outer)
    assert "did you mean max_tokens?" in from_decode_error(caught.value, Outer.__struct_fields__).message
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(b'{"items":[],"request_id":1}', type=Outer)
    far = from_decode_error(caught.value, ("lora_request", "max_tokens"))
    assert far.message == "request_id is not a field of this request"


@pytest.mark.parametrize(
    "body",
    [
        {" - at `$" * 60_000: 1},  # 7 s in a quadratic pattern, for a fifth of it
        {"x" * 30_000_000: 1},  # 3.8 s in difflib, and an answer of 60 MB
        {"items": [{"size": 1, "`" * 1_000_000: 1}]},
        {"items": [{"size": 1, "kind": "x" * 1_000_000}]},
    ],
    ids=["quadratic", "long", "nested", "value"],
)
def test_a_clients_text_is_cut_before_anything_looks_at_it(body: Any) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(json.dumps(body), type=Outer)
    started_s = time.thread_time()
    error = from_decode_error(caught.value, Outer.__struct_fields__)
    assert time.thread_time() - started_s < 0.5
    assert len(error.encode()) < 1_000
    assert error.param is not None
    assert len(error.param) <= 120


@pytest.mark.parametrize("length", [99, 100, 101])
def test_a_name_is_shown_whole_or_cut_with_a_mark(length: int) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(json.dumps({"items": [{"size": 1, "x" * length: 1}]}), type=Outer)
    param = from_decode_error(caught.value).param
    assert param == "items[0]." + ("x" * length if length <= 100 else "x" * 99 + "…")


def test_no_error_repeats_more_than_a_line_of_what_was_sent() -> None:
    error = to_api_error(BadRequestError("no such thing: " + "x" * 1_000_000, param="y" * 1_000_000))
    assert len(error.encode()) < 2_000


@pytest.mark.parametrize(
    ("failure", "status", "param"),
    [
        (BadRequestError("too long", param="prompt"), 400, "prompt"),
        (ApiError(429, "later"), 429, None),
        (EngineDeadError("killed, see /var/secret"), 503, None),
        (TokenizerError("/home/me/secret.json"), 500, None),
        (RuntimeError("secret"), 500, None),
    ],
)
def test_every_exception_has_an_answer_that_tells_no_secret(failure: Exception, status: int, param: str | None) -> None:
    answer = to_api_error(failure)
    assert (answer.status, answer.param) == (status, param)
    assert set(answer.body()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in answer.encode().decode()


def test_it_sends_itself() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(ApiError(429, "später", headers={"Retry-After": "3"}).respond(send))
    start, body = sent
    headers = dict(start["headers"])
    assert start["status"] == 429
    assert headers[b"retry-after"] == b"3"
    assert int(headers[b"content-length"]) == len(body["body"])
    assert json.loads(body["body"])["error"]["message"] == "später"
