"""The bodies of the four POST paths, from bytes to what the engine would be given."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import fakes
from server_harness import ScriptedEngine

from fuzz.harness import Target
from quire.errors import BadRequestError
from quire.server.chat import render
from quire.server.completions import read_prompts
from quire.server.errors import ApiError
from quire.server.protocol import BodyDecoder, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quire.server.sampling import chat_params, completion_params

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-body")
_ENGINE = ScriptedEngine(fakes.write_tiny_model(Path(_FOLDER.name)))
_CHAT, _COMPLETION, _TOKENIZE, _DETOKENIZE = map(BodyDecoder, (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody))


def parse(data: bytes) -> None:
    """The paths' handlers, as far as they go without running anything."""
    handlers = (_chat, _completion, _tokenize, _DETOKENIZE.decode)
    refusals = [error for handler in handlers if (error := _refusal(handler, data))]
    _ENGINE.prepared.clear()
    for error in refusals:
        assert error.status == 400, error.message
        assert len(error.encode()) < 4_000, "an error that repeats its body"
        assert not error.param or len(error.param) < 500, "a name that repeats the body, in the log too"
    if len(refusals) == len(handlers):
        raise max(refusals, key=lambda error: len(error.message))


def _refusal(handler: Callable[[bytes], object], data: bytes) -> ApiError | None:
    try:
        handler(data)
    except ApiError as error:
        return error
    except BadRequestError as error:
        return ApiError(400, str(error), param=error.param)
    return None


def _chat(data: bytes) -> None:
    body = _CHAT.decode(data)
    params = chat_params(body, _ENGINE.default_sampling)
    _ENGINE.prepare("r", render(_ENGINE, body), params, priority=body.priority or 0)


def _completion(data: bytes) -> None:
    body = _COMPLETION.decode(data)
    params = completion_params(body, _ENGINE.default_sampling)
    for prompt in read_prompts(body.prompt)[:8]:
        given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        _ENGINE.prepare("r", given, params)


def _tokenize(data: bytes) -> None:
    body = _TOKENIZE.decode(data)
    if body.messages is not None:
        render(_ENGINE, body)


TARGET = Target(
    name="http_body",
    parse=parse,
    refusals=(ApiError,),
    words=(
        *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b"-0", b"1e308", b"\\ud800", b"\\u0000", b"\\"),
        *(b" - at `$", b"`", b"$.", b'"messages":', b'"content":', b'"role":', b'"prompt":', b'"n":', b'"stop":'),
        *(b'"type":"image_url",', b'"tool_calls":', b'"logit_bias":', b'"cache_salt":', b'"chat_template_kwargs":'),
        *(b'"allowed_token_ids":', b'"bad_words":', b'"timeout":', b'"tools":[],', b"\xf0\x9f\x98\x80", b"\xff"),
    ),
    max_cpu_s=2.0,
)
