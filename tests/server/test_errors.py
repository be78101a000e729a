from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from quire.errors import BadRequestError, EngineDeadError, TokenizerError
from quire.server.errors import ApiError, from_decode_error, to_api_error


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: int


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
